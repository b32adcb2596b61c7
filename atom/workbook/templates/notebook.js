(() => {
  // a narrow window shows a wide table's rows one below the other, each cell with its column's name
  for (const table of document.querySelectorAll(".atom-table table")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
    if (names.length < 6) continue;
    table.classList.add("stacked");
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, column) => (cell.dataset.label = names[column] || ""));
    }
  }
  const folds = [...document.querySelectorAll("details.atom-code")];
  const button = document.querySelector(".fold");
  if (!button || folds.length === 0) return;
  const show = () => {
    const open = folds.every((fold) => fold.open);
    button.setAttribute("aria-pressed", String(open));
    button.textContent = open ? "Hide all code" : "Show all code";
  };
  button.addEventListener("click", () => {
    const open = !folds.every((fold) => fold.open);
    for (const fold of folds) fold.open = open;
    show();
  });
  for (const fold of folds) fold.addEventListener("toggle", show);
  button.hidden = false;
  show();
})();
