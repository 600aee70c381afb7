"use strict";
(() => {
  // Tables can be sorted, filtered and saved; what is chosen stands in the address after '?', so that a link shows it.
  const words = new Intl.Collator("en", { numeric: true });
  const TOLD = "tr:not([hidden]) > :is([title], [data-hint]):not(:has(button))";
  const shown = (cell) => cell.textContent.trim();

  class Sheet {
    constructor(element) {
      this.name = element.dataset.name;
      this.table = element.querySelector("table");
      this.head = [...this.table.tHead.rows[0].cells];
      this.rows = [...this.table.tBodies[0].rows];
      this.count = element.querySelector("output");
      this.find = element.querySelector("input");
      this.choices = [...element.querySelectorAll("select")];
      this.sorted = 0; // place of the column from 1, negative where it descends, 0 for the order of the page
      element.querySelector(".tools").hidden = false;
      for (const button of element.querySelectorAll("[data-do]")) {
        button.onclick = () => this[button.dataset.do]();
        button.hidden = button.dataset.do === "copy" && !navigator.clipboard; // plain http has none
      }
      this.table.onkeydown = (event) => this.step(event);
      if (this.find) this.equip();
      this.stop();
    }

    equip() {
      for (const control of [this.find, ...this.choices]) control.oninput = () => { this.filter(); write(); };
      this.head.forEach((cell, place) => {
        const button = document.createElement("button");
        button.type = "button";
        button.append(...cell.childNodes);
        button.onclick = () => { this.sort(next(this.sorted, place + 1)); write(); };
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
      const chosen = this.choices.filter((select) => select.value);
      this.texts ??= this.rows.map((row) => [...row.cells].map(shown).join("\n").toLowerCase());
      this.rows.forEach((row, index) => {
        row.hidden = !wanted.every((word) => this.texts[index].includes(word)) ||
          !chosen.every((select) => shown(row.cells[select.dataset.column]) === select.value);
      });
      this.stop();
      this.say();
    }

    // Fields with words of their own: one stop of the tab key a table, arrows go from one to the next.
    stop(to = this.table.querySelector(TOLD)) {
      this.table.querySelector("tr > [tabindex='0']")?.removeAttribute("tabindex");
      if (to) to.tabIndex = 0;
    }

    step(event) {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step || !event.target.matches(TOLD)) return;
      const told = [...this.table.querySelectorAll(TOLD)], to = told[told.indexOf(event.target) + step];
      event.preventDefault();
      if (!to) return;
      this.stop(to);
      to.focus();
    }

    visible() { return [...this.table.tBodies[0].rows].filter((row) => !row.hidden); }

    say(more = "") {
      const all = this.rows.length, now = this.visible().length;
      this.count.textContent = `${now === all ? all : `${now} of ${all}`} ${all === 1 ? "row" : "rows"}${more}`;
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

    copy() {
      navigator.clipboard.writeText(this.csv()).then(() => this.say(", copied"), () => this.say(", not copied"));
    }

    // What differs from the page as it came.
    state() {
      const found = [["sort", this.sorted || ""], ["find", this.find.value],
        ...this.choices.map((select) => [select.dataset.column, select.value])];
      return found.filter(([, value]) => value).map(([name, value]) => [`${this.name}.${name}`, value]);
    }

    restore(state) {
      const of = (name) => state.get(`${this.name}.${name}`) ?? "";
      this.find.value = of("find");
      for (const select of this.choices) {
        select.value = of(select.dataset.column);
        if (select.selectedIndex < 0) select.value = "";
      }
      this.sort(parseInt(of("sort"), 10) || 0);
      this.filter();
    }
  }

  const next = (now, place) => now === place ? -place : now === -place ? 0 : place;
  const mains = [...document.querySelectorAll(".sheet:has(table)")]
    .map((element) => new Sheet(element)).filter((sheet) => sheet.find);

  const parts = () => location.hash.slice(1).split("?");
  function write() {
    const state = new URLSearchParams(mains.flatMap((sheet) => sheet.state())).toString();
    history.replaceState(null, "", `#${parts()[0]}${state && "?"}${state}`);
  }
  function read() {
    const [anchor, state] = parts();
    if (state === undefined) return write();
    mains.forEach((sheet) => sheet.restore(new URLSearchParams(state)));
    if (anchor) document.getElementById(anchor)?.scrollIntoView();
  }
  addEventListener("hashchange", read);
  if (location.hash) read();

  // Timelines: the bars lie in a picture within the drawing, whose view is the part of the step that is seen.
  const PREFIXES = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [0, "ns"]];
  class Timeline {
    constructor(drawing) {
      const [left, right, seconds] = drawing.dataset.zoom.split(" ").map(Number);
      const height = drawing.viewBox.baseVal.height;
      Object.assign(this, { left, right, seconds, height });
      this.view = document.createElementNS(drawing.namespaceURI, "svg");
      const box = { x: left, y: 0, width: right - left, height, preserveAspectRatio: "none" };
      for (const name in box) this.view.setAttribute(name, box[name]);
      const bars = [...drawing.querySelectorAll(".piece")];
      bars[0].before(this.view);
      this.view.append(...bars);
      const lines = [...(drawing.querySelector(".grid")?.getAttribute("d") ?? "").matchAll(/M([\d.]+)/g)].map((line) => +line[1]);
      this.ticks = [...drawing.querySelectorAll(".tick")].map((tick) => {
        const x = +tick.getAttribute("x"), far = (line) => Math.abs(line - x);
        if (x < left + 30) { tick.setAttribute("x", left); tick.setAttribute("text-anchor", left < 30 ? "start" : "middle"); }
        return { tick, text: tick.textContent, x: lines.reduce((best, line) => far(line) < far(best) ? line : best, Infinity) };
      });
    }
    // Shows the part of the step from one share of the axis to another.
    show(from, to) {
      const wide = this.right - this.left;
      this.view.setAttribute("viewBox", `${this.left + from * wide} 0 ${(to - from) * wide} ${this.height}`);
      const [size, unit] = PREFIXES.find(([size]) => to * this.seconds >= size), scale = size || 1e-9;
      for (const { tick, text, x } of this.ticks) {
        const time = (from + (to - from) * (x - this.left) / wide) * this.seconds / scale;
        tick.textContent = to - from === 1 ? text : `${Number(time.toPrecision(4))} ${unit}`;
      }
    }
  }
  for (const tools of document.querySelectorAll(".zoom")) {
    const lines = [...tools.parentElement.querySelectorAll("[data-zoom]:not(button)")].map((one) => new Timeline(one));
    const buttons = [...tools.querySelectorAll("button")];
    let from = 0, wide = 1; // shares of the axis
    const show = (start, share) => {
      wide = Math.min(1, Math.max(1 / 64, share));
      from = Math.min(1 - wide, Math.max(0, start));
      for (const line of lines) line.show(from, from + wide);
      for (const button of buttons) {
        const { zoom, move } = button.dataset;
        button.disabled = zoom ? (zoom < 1 ? wide <= 1 / 64 : wide === 1) : move < 0 ? from <= 0 : from + wide >= 1;
      }
    };
    for (const button of buttons) button.onclick = () => {
      const { zoom = 1, move = 0 } = button.dataset;
      show(from + move * wide, zoom * wide);
    };
    for (const line of lines) line.view.ondblclick = (event) => {
      const box = line.view.getBoundingClientRect(), at = (event.clientX - box.left) / box.width;
      show(from + wide * (at - 0.25), wide / 2);
    };
    tools.hidden = !lines.length;
    show(0, 1);
  }

  // Words about a mark or a field, on hovering and on focus; Escape closes them.
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
