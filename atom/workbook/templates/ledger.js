(() => {
  const form = document.querySelector(".filter");
  const rows = [...document.querySelectorAll(".ledger tbody tr")];
  const buttons = [...form.querySelectorAll("[data-verdict]")];
  const selects = [...form.querySelectorAll("select")];
  const search = form.querySelector("input");
  const count = form.querySelector("output");
  const verdicts = new Set();
  // a linked claim is shown whatever the filters say
  const linked = () => {
    const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    return place ? place.closest("tbody") : null;
  };
  const read = () => {
    const state = new URLSearchParams(location.search);
    verdicts.clear();
    // an unknown verdict in an address filters nothing, like any other unknown value
    const known = new Set(buttons.map((button) => button.dataset.verdict));
    for (const verdict of state.getAll("verdict")) if (known.has(verdict)) verdicts.add(verdict);
    for (const select of selects) {
      select.value = state.get(select.name) || "";
      if (select.selectedIndex < 0) select.value = "";
    }
    search.value = state.get("text") || "";
  };
  const write = () => {
    const state = new URLSearchParams();
    for (const verdict of verdicts) state.append("verdict", verdict);
    for (const field of [...selects, search]) {
      if (field.value) state.set(field.name, field.value);
    }
    const query = String(state);
    try {
      history.replaceState(null, "", `${location.pathname}${query && "?"}${query}${location.hash}`);
    } catch {
      // some browsers refuse this for a page from disk; the filters work all the same
    }
  };
  const update = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = linked();
    let visible = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const wanted =
        (verdicts.size === 0 || verdicts.has(row.dataset.verdict)) &&
        selects.every((s) => !s.value || row.dataset[s.name].split("|").includes(s.value)) &&
        words.every((word) => text.includes(word));
      row.hidden = !(wanted || row.parentElement === kept);
      visible += row.hidden ? 0 : 1;
    }
    const note = kept ? `, ${kept.id.replace("claim-", "")} is linked and always shown` : "";
    count.textContent = `${visible} of ${rows.length} rows${note}`;
    for (const button of buttons) {
      button.setAttribute("aria-pressed", String(verdicts.has(button.dataset.verdict)));
    }
  };
  const changed = () => {
    write();
    update();
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const verdict = button.dataset.verdict;
      if (!verdicts.delete(verdict)) verdicts.add(verdict);
      changed();
    });
  }
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    verdicts.clear();
    for (const field of [...selects, search]) field.value = "";
    changed();
  });
  addEventListener("hashchange", update);
  addEventListener("popstate", () => {
    read();
    update();
  });
  form.hidden = false;
  read();
  update();
  // rows that were just hidden have moved the linked place
  const place = linked() || document.getElementById(location.hash.slice(1));
  if (place) place.scrollIntoView();
})();
