(() => {
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
