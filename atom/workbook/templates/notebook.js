(() => {
  // a narrow window shows a wide table's rows one below the other, each cell with its column's name
  for (const table of document.querySelectorAll(".atom-table table")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
    const rows = [...table.tBodies[0].rows];
    const longest = Math.max(0, ...rows.map((row) => row.textContent.replace(/\s+/g, " ").length));
    for (const row of rows) for (const cell of row.cells) breakable(cell);
    if (names.length < 3 || (names.length < 6 && longest <= 64)) continue;
    table.classList.add("stacked");
    for (const row of rows) {
      [...row.cells].forEach((cell, column) => (cell.dataset.label = names[column] || ""));
    }
  }
  // names of code and paths may go on in the next line behind a _ or a /
  function breakable(cell) {
    // a hash, say, which has none: anywhere
    cell.classList.toggle("unbroken", /[^\s_/]{24}/.test(cell.textContent));
    const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walk.nextNode()) found.push(walk.currentNode);
    for (const node of found) {
      const parts = node.data.replace(/([a-z][_/])(?=[a-z])/gi, "$1\u200b").split("\u200b");
      if (parts.length === 1) continue;
      const wbr = () => document.createElement("wbr");
      node.replaceWith(...parts.flatMap((part, i) => (i ? [wbr(), part] : [part])));
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
