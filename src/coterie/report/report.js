"use strict";
const table = document.querySelector("#people");
if (table) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const value = (row, i) => row.cells[i].textContent.trim();
  const number = (text) => text === "–" ? NaN : parseFloat(text.replace("−", "-").replace("∞", "Infinity"));
  heads.forEach((head, i) => {
    const button = document.createElement("button"), numeric = head.classList.contains("num");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      const order = (a, b) => {
        if (!numeric) return sign * value(a, i).localeCompare(value(b, i), undefined, { numeric: true });
        const x = number(value(a, i)), y = number(value(b, i));
        return isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) : sign * (x - y || 0);
      };
      body.append(...[...body.rows].sort(order));
    });
  });
  const filter = document.querySelector("#filter"), text = filter.querySelector("input");
  const pick = filter.querySelector("select"), shown = filter.querySelector("output");
  const apply = () => {
    const wanted = text.value.trim().toLowerCase();
    let n = 0;
    for (const row of body.rows) {
      const fits = value(row, 0).toLowerCase().includes(wanted) && (!pick || !pick.value || row.dataset.k === pick.value);
      row.hidden = !fits;
      n += fits;
    }
    shown.textContent = n === body.rows.length ? "" : `${n} of ${body.rows.length}`;
  };
  text.addEventListener("input", apply);
  if (pick) pick.addEventListener("change", apply);
  filter.hidden = false;
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
