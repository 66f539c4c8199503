// The completion viewer: a table of all completions that filters, sorts and searches (here), and one
// completion or a group of them as tokens (viewer_tokens.js). Text of a run becomes a text node and
// nothing else.
(() => {
  "use strict";
  const { element, figure, nameOf, visible, CompletionDialog } = globalThis.trustbatchTokens;
  const ROWS_PER_PAGE = 50;
  const EXCERPT = 160;
  const collator = new Intl.Collator("en", { numeric: true });

  const COLUMNS = [
    { key: "runName", label: "Run", isRun: true },
    { key: "step", label: "Step", isNumber: true },
    { key: "prompt", label: "Prompt", isText: true },
    { key: "completion", label: "Completion", isText: true },
    { key: "reward", label: "Reward", isNumber: true },
    { key: "advantage", label: "Advantage", isNumber: true },
    { key: "tokens", label: "Length", isNumber: true },
    { key: "one_minus_ess", label: "1‑ESS", isNumber: true },
    { key: "finish_reason", label: "Ending" },
    { key: "origin", label: "Sampled by" },
  ];
  const RANGES = [
    { key: "step", label: "Step" },
    { key: "reward", label: "Reward" },
    { key: "tokens", label: "Length" },
    { key: "one_minus_ess", label: "1‑ESS" },
  ];
  const CHOICES = [
    { key: "runName", label: "Run" },
    { key: "finish_reason", label: "Ending" },
    { key: "origin", label: "Sampled by" },
  ];

  /** Return an object per completion, made of the columns of the page's data. */
  function rowsOf(data) {
    const columns = Object.entries(data.columns);
    const count = columns.length ? columns[0][1].length : 0;
    return Array.from({ length: count }, (_, place) => {
      const row = Object.fromEntries(columns.map(([key, values]) => [key, values[place]]));
      row.group = data.groups[row.group];
      row.source = data.sources[row.source];
      (row.group.rows ??= []).push(row);
      row.runName = data.runs[row.group.run];
      row.isOneOfRuns = data.runs.length > 1;
      row.step = row.group.step;
      row.prompt = row.group.prompt;
      row.origin = [nameOf(row.source), row.source.version].filter((part) => part !== null)
        .join(" · v");
      return row;
    });
  }


  function lowered(holder, text) {
    return (holder.lowered ??= text.toLowerCase());
  }

  function matches(row, wanted) {
    for (const [key, value] of wanted.choices) if (row[key] !== value) return false;
    for (const [key, low, high] of wanted.ranges) {
      const value = row[key];
      if (value === null || value < low || value > high) return false;
    }
    const prompt = lowered(row.group, `${row.group.prompt_id}\n${row.prompt}`);
    if (wanted.prompt && !prompt.includes(wanted.prompt)) return false;
    if (!wanted.text) return true;
    return prompt.includes(wanted.text) || lowered(row, row.completion).includes(wanted.text);
  }

  /** Sort by a column; what has no value comes last in both directions. */
  function sorted(rows, key, direction) {
    return rows.slice().sort((a, b) => {
      const [left, right] = [a[key], b[key]];
      if (left === null || right === null) return (left === null) - (right === null);
      const order = typeof left === "number" ? left - right : collator.compare(left, right);
      return direction * order;
    });
  }

  /** Return the beginning of a text in one line, or the place where a search finds it. */
  function excerpt(text, query) {
    const place = query ? text.toLowerCase().indexOf(query) : -1;
    const oneLine = (part) => visible(part.replace(/[ \t\r\n]+/g, " "));
    const cut = element("span", { class: "excerpt" });
    if (place < 0) {
      cut.append(oneLine(text.slice(0, EXCERPT)), text.length > EXCERPT ? "…" : "");
      return cut;
    }
    const start = place > EXCERPT / 3 ? place - EXCERPT / 4 : 0;
    const end = place + query.length;
    const found = element("mark", {}, oneLine(text.slice(place, end)));
    cut.append(start ? "…" : "", oneLine(text.slice(start, place)), found);
    cut.append(oneLine(text.slice(end, end + EXCERPT)), text.length > end + EXCERPT ? "…" : "");
    return cut;
  }

  class CompletionTable {
    constructor(root, data) {
      this.rows = rowsOf(data);
      this.shown = this.rows;
      this.page = 0;
      this.sorting = null;
      this.columns = COLUMNS.filter((column) => data.runs.length > 1 || !column.isRun);
      this.dialog = new CompletionDialog(root, (row) => this.reveal(row));
      this.status = element("output", { class: "count" });
      this.body = element("tbody", {
        onclick: (event) => this.openAt(event.target.closest("tr")),
        onkeydown: (event) => this.onKey(event),
      });
      this.heads = element("tr", {}, ...this.columns.map((column) => this.head(column)));
      this.pager = element("div", { class: "pager" });
      const table = element("table", { class: "completions" },
        element("thead", {}, this.heads), this.body);
      root.append(this.filters(), element("div", { class: "scroll" }, table), this.pager);
      this.update();
    }

    filters() {
      const search = (name, label, hint) => element("label", { class: "wide" }, label,
        element("input", { type: "search", name, placeholder: hint, autocomplete: "off" }));
      const bound = (name, title, label) => element("input", {
        type: "number", step: "any", name, placeholder: label, "aria-label": `${title} ${label}`,
      });
      const ranges = RANGES.filter(({ key }) => this.rows.some((row) => row[key] !== null))
        .map(({ key, label }) => element("fieldset", {}, element("legend", {}, label),
          bound(`${key}.low`, label, "from"), bound(`${key}.high`, label, "to")));
      const choices = CHOICES.map((choice) => this.choice(choice)).filter(Boolean);
      this.form = element("form", {
        class: "filters", role: "search", oninput: () => this.update(), onsubmit: (event) => {
          event.preventDefault();
        }, onreset: () => setTimeout(() => this.update()),
      },
      search("text", "Search", "in prompts and completions"),
      search("prompt", "Prompt", "its id or a part of it"), ...ranges, ...choices,
      element("button", { type: "reset" }, "Clear"), this.status);
      return this.form;
    }

    choice({ key, label }) {
      const values = [...new Set(this.rows.map((row) => row[key]))].sort(collator.compare);
      if (values.length < 2) return null;
      // the value is the place in the list: "" stands for all, and may be a real value too
      const options = values.map((value, place) =>
        element("option", { value: String(place) }, value || "–"));
      const select = element("select", { name: key },
        element("option", { value: "" }, "all"), ...options);
      select.values = values;
      return element("label", {}, label, select);
    }

    wanted() {
      const field = (name) => this.form.elements.namedItem(name);
      const limit = (name, none) => (field(name).value === "" ? none : Number(field(name).value));
      const ranges = RANGES.filter(({ key }) => field(`${key}.low`)).map(({ key }) =>
        [key, limit(`${key}.low`, -Infinity), limit(`${key}.high`, Infinity)]);
      const choices = CHOICES.map(({ key }) => [key, field(key)])
        .filter(([, select]) => select?.value)
        .map(([key, select]) => [key, select.values[Number(select.value)]]);
      return {
        text: field("text").value.toLowerCase(),
        prompt: field("prompt").value.toLowerCase(),
        ranges: ranges.filter(([, low, high]) => low !== -Infinity || high !== Infinity),
        choices,
      };
    }

    update() {
      const wanted = this.wanted();
      this.query = wanted.text;
      this.shown = this.rows.filter((row) => matches(row, wanted));
      if (this.sorting) this.shown = sorted(this.shown, this.sorting.key, this.sorting.direction);
      const [found, all] = [figure(this.shown.length), figure(this.rows.length)];
      this.status.textContent = `${found} of ${all} completions`;
      this.turnTo(0);
    }

    head(column) {
      const order = element("span", { class: "order", "aria-hidden": "true" });
      const button = element("button", { type: "button" }, column.label, order);
      button.addEventListener("click", () => this.sortBy(column.key));
      return element("th", {
        scope: "col", class: column.isNumber ? "number" : "", "data-key": column.key,
      }, button);
    }

    /** Sort upward, then downward, then as recorded. */
    sortBy(key) {
      const direction = this.sorting?.key === key ? this.sorting.direction : 0;
      this.sorting = direction < 0 ? null : { key, direction: direction ? -1 : 1 };
      for (const head of this.heads.children) {
        const mine = this.sorting?.key === head.dataset.key ? this.sorting.direction : 0;
        head.setAttribute("aria-sort", ["descending", "none", "ascending"][mine + 1]);
        head.querySelector(".order").textContent = ["▼", "", "▲"][mine + 1];
      }
      this.update();
    }

    turnTo(page) {
      const last = Math.max(0, Math.ceil(this.shown.length / ROWS_PER_PAGE) - 1);
      this.page = Math.min(Math.max(page, 0), last);
      const first = this.page * ROWS_PER_PAGE;
      const rows = this.shown.slice(first, first + ROWS_PER_PAGE);
      this.body.replaceChildren(...rows.map((row, place) => this.line(row, first + place)));
      if (!rows.length) this.body.append(element("tr", {}, element("td", {
        colspan: String(this.columns.length), class: "nothing",
      }, "No completion passes these filters.")));
      else this.body.firstChild.tabIndex = 0;
      const turn = (label, to, name) => element("button", {
        type: "button", "aria-label": name, disabled: to < 0 || to > last,
        onclick: () => this.turnTo(to),
      }, label);
      const extent = `${figure(first + 1)}–${figure(first + rows.length)}`;
      this.pager.replaceChildren(...(last ? [
        turn("«", this.page ? 0 : -1, "First page"), turn("‹", this.page - 1, "Previous page"),
        element("span", {}, `${extent} of ${figure(this.shown.length)}`),
        turn("›", this.page + 1, "Next page"),
        turn("»", this.page < last ? last : last + 1, "Last page"),
      ] : []));
    }

    line(row, place) {
      const cells = this.columns.map(({ key, isNumber, isText }) => {
        if (isNumber) return element("td", { class: "number" }, figure(row[key]));
        if (isText) return element("td", { class: `text ${key}` }, excerpt(row[key], this.query));
        if (key === "runName") {
          const dot = element("i", { class: `run-dot c${row.group.run % 8}` });
          return element("td", { class: "run" }, dot, visible(row[key]));
        }
        return element("td", { class: "name", title: row[key] }, visible(row[key] || "–"));
      });
      return element("tr", { tabindex: "-1", "data-place": String(place) }, ...cells);
    }

    openAt(line) {
      if (line?.dataset.place) this.dialog.open(this.shown, Number(line.dataset.place));
    }

    onKey(event) {
      const line = event.target.closest("tr");
      const lines = { ArrowDown: line.nextSibling, ArrowUp: line.previousSibling,
        Home: this.body.firstChild, End: this.body.lastChild };
      const pages = { PageDown: 1, PageUp: -1 };
      if (event.key === "Enter" || event.key === " ") this.openAt(line);
      else if (event.key in lines) this.focusOn(lines[event.key]);
      else if (event.key in pages) {
        this.turnTo(this.page + pages[event.key]);
        this.focusOn(this.body.firstChild);
      } else return;
      event.preventDefault();
    }

    focusOn(line) {
      if (!line) return;
      for (const other of this.body.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
      line.tabIndex = 0;
      line.focus();
    }

    /** Bring back the focus to the completion that was read last. */
    reveal(row) {
      const place = this.shown.indexOf(row);
      if (place < 0) return;
      this.turnTo(Math.floor(place / ROWS_PER_PAGE));
      this.focusOn(this.body.children[place % ROWS_PER_PAGE]);
    }
  }

  /** Show completions in an element; `data` is what viewer.py prepares. */
  globalThis.showCompletions = (root, data) => new CompletionTable(root, data);

  for (const root of document.querySelectorAll(".viewer")) {
    const data = root.querySelector('script[type="application/json"]');
    globalThis.showCompletions(root, JSON.parse(data.textContent));
    data.remove();
  }
})();
