"use strict";
// The live page: a list of runs, charts of those that are chosen, and their newest completions. It asks
// every few seconds, and gets only the steps that are new.
(() => {
  const { html, swatch } = Charts;
  const POLL_MS = 3000;
  const LONGEST_TAIL = 2000; // steps added one by one, before the server is asked to thin them
  const MOST_CHOSEN = 24; // colors and dashes tell no more apart
  const COLUMNS = [
    ["Run", null], ["State", null], ["Step", "step"], ["Reward", "reward"], ["1-ESS", "one_minus_ess"],
    ["Entropy", "entropy"], ["Lag", "lag"], ["Tokens/s", "tokens_per_second"], ["Changed", "changed"],
  ];
  const place = (id) => document.getElementById(id);
  const list = { page: 0, query: "", answer: null };
  const chosen = new Map(); // name → {line, generation, rows, tail, series: Map of key → series}
  const mounted = new Map(); // key → chart
  const models = new Map(); // key → what a chart has besides its series
  const shownCompletions = new Map(); // name → the block of a run

  async function ask(what, parameters) {
    const answer = await fetch(`/api/${what}?${new URLSearchParams(parameters)}`);
    if (!answer.ok) throw Object.assign(new Error(await answer.text()), { status: answer.status });
    return answer.json();
  }

  function ago(seconds) {
    const passed = Math.max(Date.now() / 1000 - seconds, 0);
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
      if (passed >= size) return `${Math.floor(passed / size)} ${unit} ago`;
    }
    return `${Math.floor(passed)} s ago`;
  }

  // The list

  function listPart() {
    const search = html("input", { type: "search", placeholder: "find runs by name" });
    search.addEventListener("input", () => {
      Object.assign(list, { query: search.value, page: 0 });
      refreshList();
    });
    const turn = (step) => {
      const made = html("button", { type: "button" }, step < 0 ? "newer" : "older");
      made.addEventListener("click", () => {
        list.page += step;
        refreshList();
      });
      return made;
    };
    const parts = { search, newer: turn(-1), older: turn(1), count: html("span", { class: "hint" }) };
    parts.body = html("tbody");
    const heads = COLUMNS.map(([name, key]) =>
      html("th", { scope: "col", class: key ? "number" : "" }, name));
    const table = html("table", { class: "runs" }, html("thead", {}, html("tr", {}, ...heads)), parts.body);
    place("runs").append(
      html("div", { class: "toolbar" }, search, parts.newer, parts.older, parts.count),
      html("div", { class: "scroll" }, table),
    );
    return parts;
  }

  const parts = listPart();

  async function refreshList() {
    list.answer = await ask("runs", { page: list.page, query: list.query });
    showList();
  }

  function showList() {
    const { rows, total, per_page: perPage, folder } = list.answer;
    place("where").textContent = folder;
    parts.newer.disabled = list.page === 0;
    parts.older.disabled = (list.page + 1) * perPage >= total;
    parts.newer.hidden = parts.older.hidden = total <= perPage;
    const first = list.page * perPage;
    parts.count.textContent = !total ? "No runs here yet: start one, and it appears."
      : total > perPage ? `${first + 1} to ${first + rows.length} of ${total}, newest first`
        : `${total}, newest first; a click chooses what the charts compare`;
    parts.body.replaceChildren(...rows.map(rowOf));
  }

  function rowOf(row) {
    const isChosen = chosen.has(row.name);
    const name = html("th", { scope: "row" });
    if (row.kind === "run") {
      const box = html("input", { type: "checkbox", "aria-label": row.name });
      box.checked = isChosen;
      name.append(box, ...(isChosen ? [swatch(chosen.get(row.name).line)] : []));
    }
    name.append(html("span", {}, row.name));
    if (row.page) {
      const address = `/page?${new URLSearchParams({ name: row.name })}`;
      const what = row.kind === "study" ? "study page" : "report";
      name.append(html("a", { href: address, target: "_blank", rel: "noopener" }, what));
    }
    const look = { class: `chip ${row.state ?? "study"}`, title: row.error || row.sentence || "" };
    const word = row.kind === "study" ? `study of ${row.runs} runs` : row.state;
    const state = html("td", {}, html("span", look, word));
    const cells = COLUMNS.slice(2).map(([, key]) => html("td", { class: "number" }, cellOf(row, key)));
    const made = html("tr", { class: isChosen ? "chosen" : "" }, name, state, ...cells);
    if (row.kind === "run") {
      made.addEventListener("click", (event) => {
        if (!event.target.closest("a")) choose(row.name);
      });
    }
    return made;
  }

  function cellOf(row, key) {
    if (key === "changed") return ago(row.changed);
    if (key === "step" && row.steps) return `${Axes.short(row.step)} / ${Axes.short(row.steps)}`;
    return row[key] === null || row[key] === undefined ? "–" : Axes.short(row[key]);
  }

  // What is chosen

  function drop(name) {
    if (!chosen.has(name)) return;
    Charts.clocks.delete(chosen.get(name).line);
    chosen.delete(name);
    shownCompletions.get(name)?.block.remove();
    shownCompletions.delete(name);
  }

  // A run that was deleted or renamed since it was chosen is chosen no more.
  async function askOfRun(what, parameters) {
    try {
      return await ask(what, parameters);
    } catch (error) {
      if (error.status !== 404) throw error;
      drop(parameters.name);
      return null;
    }
  }

  function choose(name) {
    if (chosen.has(name)) {
      drop(name);
    } else if (chosen.size < MOST_CHOSEN) {
      const taken = new Set([...chosen.values()].map((each) => each.line));
      let line = 0;
      while (taken.has(line)) line++;
      chosen.set(name, { line, generation: 0, rows: 0, tail: 0, series: new Map() });
    }
    const names = [...chosen.keys()].map((each) => ["run", each]);
    history.replaceState(null, "", `#${new URLSearchParams(names)}`); // a reload keeps the choice
    showList();
    refreshCharts();
  }

  async function refreshRun(name, run) {
    const after = run.tail > LONGEST_TAIL ? 0 : run.rows;
    const answer = await askOfRun("series", { name, generation: after ? run.generation : 0, after });
    // nothing of it, or what another request has brought meanwhile
    if (!answer || (answer.first && answer.first !== run.rows)) return null;
    if (answer.first === 0 && answer.charts.length) Object.assign(run, { series: new Map(), tail: 0 });
    const isNew = answer.charts.length > 0;
    run.tail += answer.first ? answer.rows - answer.first : 0;
    Object.assign(run, { generation: answer.generation, rows: answer.rows });
    if (answer.clock) Charts.clocks.set(run.line, answer.clock);
    for (const { series: [added], ...model } of answer.charts) {
      if (!models.has(model.key)) models.set(model.key, model);
      const own = { ...added, line: run.line, run: run.line };
      run.series.set(model.key, joined(run.series.get(model.key), own));
    }
    return isNew ? run : null;
  }

  // New points behind those that are there; a point of one step is its own smallest and largest value.
  function joined(before, added) {
    if (!before) return added;
    const isSpread = before.spread || added.spread;
    const spreadOf = (each) => each.spread ?? [each.y, each.y];
    const pair = (a, b) => [a[0].concat(b[0]), a[1].concat(b[1])];
    return {
      ...added,
      x: before.x.concat(added.x),
      y: before.y.concat(added.y),
      spread: isSpread ? pair(spreadOf(before), spreadOf(added)) : undefined,
      faint: before.faint && added.faint ? before.faint.concat(added.faint) : undefined,
      bands: before.bands && added.bands
        ? before.bands.map((band, number) => pair(band, added.bands[number])) : undefined,
    };
  }

  async function refreshCharts() {
    const changes = await Promise.all([...chosen].map(([name, run]) => refreshRun(name, run)));
    showCharts(new Set(changes.filter(Boolean)));
    toolbar.show();
    await Promise.all([...chosen.keys()].map(refreshCompletions));
  }

  const toolbar = ChartToolbar.make({ numLines: MOST_CHOSEN, isSmoothed: true });
  const lead = html("div", { class: "charts lead" }), small = html("div", { class: "charts" });
  const nothing = html("p", { class: "hint" }, "Choose runs in the list to see their charts.");
  place("charts").append(html("h2", {}, "Charts"), nothing, toolbar.bar, lead, small);

  // The last folder of a name where that is enough to tell the chosen runs apart.
  function shortNames() {
    const last = (name) => name.split("/").at(-1);
    const lasts = [...chosen.keys()].map(last);
    const isAlone = (name) => lasts.filter((each) => each === last(name)).length === 1;
    return new Map([...chosen].map(([name, run]) => [run, isAlone(name) ? last(name) : name]));
  }

  function showCharts(changed) {
    const names = shortNames();
    nothing.hidden = chosen.size > 0;
    toolbar.bar.hidden = !chosen.size;
    for (const [key, model] of models) {
      const runs = [...chosen.values()].filter((run) => run.series.has(key));
      const series = runs.map((run) => ({ ...run.series.get(key), name: names.get(run) }));
      const chart = mounted.get(key);
      if (!series.length) {
        chart?.remove();
        mounted.delete(key);
      } else if (!chart) {
        mounted.set(key, mount({ ...model, series }));
      } else if (isOther(chart.model.series, series) || runs.some((run) => changed.has(run))) {
        chart.setData({ ...model, series });
      }
    }
  }

  function isOther(before, now) {
    const what = (series) => JSON.stringify(series.map(({ line, name }) => [line, name]));
    return what(before) !== what(now);
  }

  function mount(model) {
    const caption = html("figcaption", {}, html("h3", {}, model.title), html("p", {}, model.reading));
    const figure = html("figure", { class: "card", "data-metric": model.key }, caption);
    (model.lead ? lead : small).append(figure);
    return Charts.mount(figure, model);
  }

  // Completions: asked for only while a run's block is open

  function completionsBlock(name) {
    const table = html("div", { class: "scroll" });
    const head = html("summary", {}, swatch(chosen.get(name).line), html("span", {}, name));
    const block = html("details", {}, head, table);
    block.addEventListener("toggle", () => refreshCompletions(name));
    place("completions").append(block);
    return { block, table, written: "" };
  }

  async function refreshCompletions(name) {
    if (!chosen.has(name)) return;
    if (!shownCompletions.has(name)) shownCompletions.set(name, completionsBlock(name));
    const shown = shownCompletions.get(name);
    if (!shown.block.open) return;
    const rows = await askOfRun("completions", { name });
    if (!rows) return;
    const written = JSON.stringify(rows);
    if (written === shown.written) return;
    shown.written = written;
    const heads = ["Step", "Prompt", "Completion", "Answer", "Reward", "Advantage", "Tokens"];
    const cells = (row) => [
      html("td", { class: "number" }, Axes.short(row.step)),
      html("td", { class: "long" }, html("pre", {}, row.prompt ?? "")),
      html("td", { class: "long" }, html("pre", {}, row.completion ?? "")),
      html("td", { class: "answer" }, row.answer ?? "–"),
      ...["reward", "advantage", "tokens"].map((key) =>
        html("td", { class: "number" }, Axes.short(row[key] ?? NaN))),
    ];
    const head = html("tr", {}, ...heads.map((each) => html("th", { scope: "col" }, each)));
    const body = rows.map((row) => html("tr", {}, ...cells(row)));
    shown.table.replaceChildren(rows.length
      ? html("table", { class: "samples" }, html("thead", {}, head), html("tbody", {}, ...body))
      : html("p", { class: "hint" }, "No completions were saved yet."));
  }

  // Beginning, and then again and again

  place("completions").append(html("h2", {}, "Newest completions"));
  const gone = html("p", { class: "note gone", hidden: "" });
  place("where").after(gone);

  async function poll() {
    if (!document.hidden) {
      try {
        await refreshList();
        await refreshCharts();
        gone.hidden = true;
      } catch (error) {
        // a TypeError is what fetch gives for no answer at all
        gone.textContent = error instanceof TypeError
          ? "The dashboard does not answer: was it ended?" : `The dashboard failed: ${error.message}`;
        gone.hidden = false;
      }
    }
    setTimeout(poll, POLL_MS);
  }

  async function begin() {
    await refreshList();
    const asked = new URLSearchParams(location.hash.slice(1)).getAll("run");
    const newest = list.answer.rows.find((row) => row.kind === "run");
    for (const name of asked.length || !newest ? asked : [newest.name]) choose(name);
    setTimeout(poll, POLL_MS);
  }

  begin();
})();
