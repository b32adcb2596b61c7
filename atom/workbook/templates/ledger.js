(() => {
  const rows = [...document.querySelectorAll(".ledger tbody tr")];
  const buttons = [...document.querySelectorAll(".filter button")];
  const search = document.querySelector(".filter input");
  const count = document.querySelector(".filter output");
  const shown = new Set();
  const update = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let visible = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const wanted = shown.size === 0 || shown.has(row.dataset.verdict);
      row.hidden = !(wanted && words.every((word) => text.includes(word)));
      visible += row.hidden ? 0 : 1;
    }
    count.textContent = `${visible} of ${rows.length}`;
    for (const button of buttons) {
      button.setAttribute("aria-pressed", String(shown.has(button.dataset.verdict)));
    }
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const verdict = button.dataset.verdict;
      if (!shown.delete(verdict)) shown.add(verdict);
      update();
    });
  }
  search.addEventListener("input", update);
  update();
})();
