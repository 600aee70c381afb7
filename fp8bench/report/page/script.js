"use strict";
(() => {
  // Tables can be sorted, filtered and saved.
  const words = new Intl.Collator("en", { numeric: true });
  const shown = (cell) => cell.textContent.trim();

  class Sheet {
    constructor(element) {
      this.name = element.dataset.name;
      this.table = element.querySelector("table");
      this.head = [...this.table.tHead.rows[0].cells];
      this.rows = [...this.table.tBodies[0].rows];
      this.count = element.querySelector("output");
      this.find = element.querySelector("input");
      this.sorted = 0; // place of the column from 1, negative where it descends, 0 for the order of the page
      element.querySelector(".tools").hidden = false;
      element.querySelector("[data-do]").onclick = () => this.save();
      if (this.find) this.equip();
    }

    equip() {
      this.find.oninput = () => this.filter();
      this.head.forEach((cell, place) => {
        const button = document.createElement("button");
        button.type = "button";
        button.append(...cell.childNodes);
        button.onclick = () => this.sort(next(this.sorted, place + 1));
        cell.append(button);
      });
      this.say();
    }

    key(row, place) {
      const cell = row.cells[place], text = shown(cell), value = cell.dataset.value ?? text;
      const key = this.head[place].dataset.sort ? Number(value) : value;
      return value === "" || value === "-" || Number.isNaN(key) ? null : key;
    }

    // Always from the order of the page, so that equal rows keep it; those without a value come last both ways.
    sort(sorted) {
      const place = Math.abs(sorted) - 1;
      this.sorted = this.head[place] ? sorted : 0;
      this.head.forEach((cell) => cell.removeAttribute("aria-sort"));
      let order = this.rows;
      if (this.sorted) {
        this.head[place].setAttribute("aria-sort", sorted > 0 ? "ascending" : "descending");
        const keys = new Map(this.rows.map((row) => [row, this.key(row, place)]));
        const number = this.head[place].dataset.sort;
        order = [...this.rows].sort((one, other) => {
          const a = keys.get(one), b = keys.get(other);
          if (a === null || b === null) return (a === null) - (b === null);
          return Math.sign(sorted) * (number ? (a > b) - (a < b) : words.compare(a, b));
        });
      }
      this.table.tBodies[0].append(...order);
    }

    filter() {
      const wanted = this.find.value.toLowerCase().split(/\s+/).filter(Boolean);
      this.texts ??= this.rows.map((row) => [...row.cells].map(shown).join("\n").toLowerCase());
      this.rows.forEach((row, index) => {
        row.hidden = !wanted.every((word) => this.texts[index].includes(word));
      });
      this.say();
    }

    visible() { return [...this.table.tBodies[0].rows].filter((row) => !row.hidden); }

    say() {
      const all = this.rows.length, now = this.visible().length;
      this.count.textContent = `${now === all ? all : `${now} of ${all}`} ${all === 1 ? "row" : "rows"}`;
    }

    // The rows that are shown, as they are sorted; numbers with all their digits.
    csv() {
      const quote = (text) => /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
      const titles = this.head.map((cell) => shown(cell) + (cell.dataset.unit ? ` (${cell.dataset.unit})` : ""));
      const rows = this.visible().map((row) => [...row.cells].map((cell, place) =>
        this.head[place].classList.contains("n") ? cell.dataset.value ?? shown(cell) : shown(cell)));
      return [titles, ...rows].map((row) => row.map(quote).join(",") + "\n").join("");
    }

    save() {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([this.csv()], { type: "text/csv" }));
      link.download = `${this.name}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    }
  }

  const next = (now, place) => now === place ? -place : now === -place ? 0 : place;
  document.querySelectorAll(".sheet:has(table)").forEach((element) => new Sheet(element));

  // The bars of a timeline move into a picture of their own, whose view is the part of the step that is visible.
  const NONE = { x: Infinity, right: 0 };
  for (const tools of document.querySelectorAll(".zoom")) {
    const [size, part] = tools.querySelectorAll("input");
    const drawing = tools.parentElement.querySelector(".drawing > svg"), height = drawing.viewBox.baseVal.height;
    const ticks = [...drawing.querySelectorAll(".tick")].map((tick) => ({ tick, text: tick.textContent, x: +tick.getAttribute("x") }));
    let view = null, left = 0, wide = 0;

    // On first use: a folded drawing has no boxes yet.
    function equip() {
      const bars = [...drawing.querySelectorAll(".piece")];
      const { x, right } = bars.map((bar) => bar.getBBox())
        .reduce((all, box) => ({ x: Math.min(all.x, box.x), right: Math.max(all.right, box.x + box.width) }), NONE);
      [left, wide] = [x, right - x];
      view = document.createElementNS(drawing.namespaceURI, "svg");
      const box = { x: left, width: wide, height, preserveAspectRatio: "none" };
      for (const name in box) view.setAttribute(name, box[name]);
      bars[0].before(view);
      view.append(...bars);
    }
    tools.oninput = () => {
      if (!view) equip();
      const share = 2 ** -size.value, start = (1 - share) * part.value;
      view.setAttribute("viewBox", `${left + start * wide} 0 ${share * wide} ${height}`);
      part.disabled = share === 1;
      // The second tick tells how long a unit of the drawing is; no other is sure to be at its place.
      const unit = ticks[1].text.split(" ")[1], scale = parseFloat(ticks[1].text) / (ticks[1].x - left);
      for (const { tick, text, x } of ticks) {
        const time = scale * (start * wide + share * (x - left));
        tick.textContent = share === 1 ? text : `${Number(time.toPrecision(4))} ${unit}`;
      }
    };
    part.disabled = true;
    tools.hidden = false;
  }

  // Descriptions of marks and headings, on hovering and on focus; Escape closes them.
  const tip = document.getElementById("tip");
  let about = null, leaving = 0;

  function hide() {
    clearTimeout(leaving);
    about?.removeAttribute("aria-describedby");
    about = null;
    tip.hidden = true;
  }
  function place() {
    const box = about.getBoundingClientRect(), gap = 6, wide = tip.offsetWidth, high = tip.offsetHeight;
    const left = Math.min(box.left + (box.width - wide) / 2, innerWidth - wide - gap);
    tip.style.left = `${Math.max(gap, left)}px`;
    tip.style.top = `${box.top < high + 2 * gap ? box.bottom + gap : box.top - high - gap}px`;
  }
  function tell(event) {
    const element = event.target.closest("[data-hint], [title]");
    if (element === about || event.target === tip) clearTimeout(leaving);
    else if (element) {
      hide();
      // The browser's own tooltip would cover ours.
      if (element.title) { element.dataset.hint = element.title; element.removeAttribute("title"); }
      about = element;
      about.setAttribute("aria-describedby", "tip");
      tip.textContent = element.dataset.hint;
      tip.hidden = false;
      place();
    } else if (event.pointerType === "touch") hide();
  }
  // A finger leaves as soon as it has tapped; the next tap ends what the last one showed.
  const leave = (event) => {
    clearTimeout(leaving);
    if (event.pointerType !== "touch") leaving = setTimeout(hide, 150);
  };
  const close = (event) => { if (event.key === "Escape") hide(); };
  const heard = { pointerover: tell, pointermove: tell, focusin: tell, pointerout: leave, focusout: hide, keydown: close };
  for (const name in heard) document.addEventListener(name, heard[name]);
  // Who comes by keyboard may have made the page scroll.
  document.addEventListener("scroll", () => about?.contains(document.activeElement) ? place() : hide(), true);

  // Where one is, for the contents.
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const watch = new IntersectionObserver((entries) => {
    entries.forEach((entry) => seen[entry.isIntersecting ? "add" : "delete"](entry.target.id));
    const current = [...links.keys()].find((id) => seen.has(id));
    links.forEach((link, id) => link.ariaCurrent = id === current ? "true" : null);
  }, { rootMargin: "-10% 0px -75%" });
  document.querySelectorAll("section").forEach((section) => watch.observe(section));
})();
