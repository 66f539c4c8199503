// Completions as tokens in a dialog, colored by what was measured on each.
globalThis.trustbatchTokens = (() => {
  "use strict";
  /** shown at once, in all samples together: more would take seconds to lay out */
  const MOST_TOKENS = 8000;
  /** what has no picture of its own, or changes how its neighbors are shown; joiners are in words */
  const ODD = /\n|\t| {2,}|(?![\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u00a0\u202f]/gu;
  const RATIO_ENDS = [1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 30, 100, 1e3, 1e4, 1e6];
  const NUMBERS = [
    ["behavior_logp", "behavior log-prob"],
    ["policy_logp", "policy log-prob"],
    ["anchor_logp", "anchor log-prob"],
    ["ratio", "ratio"],
    ["weight", "weight"],
    ["kl", "KL"],
    ["entropy", "entropy"],
  ];
  const MODES = {
    ratio: {
      label: "Ratio", list: "ratio", isDiverging: true, isLog: true,
      reading: "Blue: the policy gives the token more probability than its sampler did; "
        + "orange: less.",
    },
    weight: {
      label: "Weight", list: "weight", least: 1,
      reading: "What the objective multiplies the advantage with; no color: the token counts "
        + "for nothing.",
    },
    push: {
      label: "Advantage × weight", list: "weight", isDiverging: true,
      reading: "Blue: the update makes the token more likely; orange: less likely.",
    },
    entropy: {
      label: "Entropy", list: "entropy",
      reading: "How undecided the policy was at this place, in nats.",
    },
    kl: { label: "KL", list: "kl", reading: "How far the policy is from the anchor here." },
    plain: { label: "Plain", reading: "" },
  };

  /** Make an element; strings become text, `onNAME` a listener. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value === true) made.setAttribute(key, "");
      else if (value !== false) made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  }

  function figure(value) {
    if (typeof value !== "number") return value === null || value === undefined ? "–" : value;
    const size = Math.abs(value);
    if (size === 0) return "0"; // not -0
    if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en-US");
    if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  }

  /** Return the name of the policy that sampled, which may be the path of a folder. */
  function nameOf({ policy }) {
    return String(policy ?? "–").split("/").filter(Boolean).pop() ?? "–";
  }

  /** Return text with a picture for each character that would not be seen, or would mislead. */
  function visible(text, withSpaces = false) {
    const made = document.createDocumentFragment();
    const mark = (shown) => element("span", { class: "odd" }, shown);
    let end = 0;
    for (const found of text.matchAll(ODD)) {
      const [odd] = found;
      if (!withSpaces && /^[\n\t ]/.test(odd)) continue;
      made.append(text.slice(end, found.index));
      end = found.index + odd.length;
      if (odd === "\n") made.append(mark("⏎"), "\n");
      else if (odd === "\t") made.append(mark("⇥"), "\t");
      else if (odd[0] === " ") made.append(mark("·".repeat(odd.length)));
      else made.append(mark(picture(odd.codePointAt(0))));
    }
    made.append(text.slice(end));
    return made;
  }

  function picture(code) {
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    return code === 127 ? "␡" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  }

  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  /** Return the token lists of a group's samples, in the order of its rows. */
  function listsOf(group) {
    return (group.lists ??= group.tokens ? unpack(group.tokens) : Promise.resolve([]));
  }

  function isOfEnvironment(lists, place) {
    return lists.behavior_logp?.[place] === null;
  }

  function valueOf(mode, row, lists, place) {
    const value = lists[MODES[mode].list]?.[place] ?? null;
    if (mode !== "push") return value;
    if (isOfEnvironment(lists, place)) return null;
    // an objective gives no weight where there is no advantage to weight
    return row.advantage === 0 ? 0 : value === null ? null : value * row.advantage;
  }

  /** Return the number on the scale at which a color is full: 49 of 50 tokens are below it. */
  function scaleEnd({ isLog, least = 0 }, values) {
    const sizes = values.filter((value) => value !== null && !(isLog && value <= 0))
      .map((value) => Math.abs(isLog ? Math.log(value) : value)).sort((a, b) => a - b);
    const most = sizes.length ? sizes[Math.ceil(0.98 * sizes.length) - 1] : 0;
    if (isLog) return RATIO_ENDS.find((end) => Math.log(end) >= most - 1e-9) ?? 1e9;
    if (most <= least) return least || (most > 0 ? round(most) : 1);
    return round(most);
  }

  /** Round up to a number with one digit, or 1.5 times a power of ten. */
  function round(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return ([1, 1.5, 2, 3, 4, 5, 6, 8].find((digit) => digit * power >= value) ?? 10) * power;
  }

  /** Return where a value lies between no color (0) and full color (1 or -1). */
  function shareOf({ isLog, isDiverging }, value, end) {
    const share = isLog ? Math.log(Math.max(value, 1e-300)) / Math.log(end) : value / end;
    return Math.min(Math.max(share, isDiverging ? -1 : 0), 1);
  }

  class CompletionDialog {
    /** `closed` is called with the completion that was shown last. */
    constructor(root, closed) {
      this.mode = "ratio";
      this.isGroup = false;
      this.panes = [];
      this.title = element("h3", { id: "completion-title" });
      this.facts = element("dl", { class: "facts" });
      this.prompt = element("details", { class: "prompt", open: true });
      this.radios = Object.fromEntries(Object.keys(MODES).map((mode) => [mode, element("input", {
        type: "radio", name: "token-color", value: mode, onchange: () => {
          this.mode = this.shownMode = mode;
          this.paint();
        },
      })]));
      this.modes = element("div", { class: "modes", role: "radiogroup", "aria-label": "Color" },
        ...Object.entries(this.radios).map(([mode, radio]) =>
          element("label", {}, radio, element("span", {}, MODES[mode].label))));
      this.scale = element("div", { class: "color-scale" });
      this.body = element("div", { class: "panes" });
      this.tip = element("div", { class: "token-tip", id: "token-tip", role: "tooltip" });
      this.tip.hidden = true;
      const button = (label, title, act) =>
        element("button", { type: "button", title, onclick: act }, label);
      this.back = button("‹ Previous", "Previous completion (k)", () => this.turn(-1));
      this.forth = button("Next ›", "Next completion (j)", () => this.turn(1));
      this.grouping = button("", "All samples of this prompt (g)", () => this.toggleGroup());
      const close = button("✕", "Close (Esc)", () => this.dialog.close());
      close.setAttribute("aria-label", "Close");
      this.dialog = element("dialog", {
        class: "completion-dialog", "aria-labelledby": "completion-title",
        onclose: () => closed(this.row),
        onclick: (event) => { if (event.target === this.dialog) this.dialog.close(); },
      },
      element("div", { class: "dialog-bar" }, this.title,
        element("div", { class: "buttons" }, this.back, this.forth, this.grouping, close)),
      element("div", { class: "dialog-content" }, this.facts, this.prompt,
        element("div", { class: "colors" }, this.modes, this.scale), this.body), this.tip);
      this.watchTokens();
      // of the page: the element that had the focus may be gone with the last completion
      document.addEventListener("keydown", (event) => this.onKey(event));
      root.append(this.dialog);
    }

    watchTokens() {
      const on = (name, act) => this.body.addEventListener(name, (event) => {
        const token = event.target.closest?.(".token");
        act(token, event);
      });
      on("pointerover", (token) => (token ? this.explain(token) : this.hideTip()));
      on("pointerleave", () => this.hideTip());
      on("focusin", (token) => { if (token) this.explain(token); });
      on("focusout", () => this.hideTip());
      this.dialog.querySelector(".dialog-content").addEventListener("scroll", () => this.hideTip());
    }

    open(rows, place) {
      this.rows = rows;
      this.place = place;
      if (!this.dialog.open) this.dialog.showModal();
      return this.show();
    }

    /** Go to the next completion, or to that of the next prompt where its samples are shown. */
    turn(change) {
      let place = this.place + change;
      while (this.isGroup && this.rows[place]?.group === this.row.group) place += change;
      if (place >= 0 && place < this.rows.length) this.open(this.rows, place);
    }

    toggleGroup() {
      this.isGroup = !this.isGroup;
      this.show();
    }

    get row() {
      return this.rows[this.place];
    }

    async show() {
      const row = this.row;
      const { group } = row;
      this.hideTip();
      const step = group.step === null ? "" : `Step ${group.step} · `;
      this.title.replaceChildren(step, visible(group.prompt_id),
        this.isGroup ? "" : ` · sample ${figure(row.sample)}`);
      this.back.disabled = this.place === 0;
      this.forth.disabled = this.place === this.rows.length - 1;
      this.grouping.hidden = group.rows.length < 2;
      const isGroup = this.isGroup && group.rows.length > 1;
      this.grouping.textContent = isGroup ? "This sample" : `All ${group.rows.length} samples`;
      this.facts.replaceChildren(...(isGroup ? groupFacts(row) : factsOf(row)));
      this.showPrompt(group);
      this.body.setAttribute("aria-busy", "true");
      const lists = await listsOf(group);
      if (row !== this.row) return; // another one was opened meanwhile
      const shown = isGroup ? group.rows : [row];
      this.panes = shown.map((each) => ({ row: each, lists: lists[group.rows.indexOf(each)] }));
      this.body.classList.toggle("group", isGroup);
      this.body.replaceChildren(...this.panes.map((pane) => this.pane(pane, isGroup)));
      this.showModes();
      this.body.setAttribute("aria-busy", "false");
    }

    showPrompt(group) {
      const isSeen = group.model_prompt !== null;
      this.prompt.replaceChildren(
        element("summary", {}, isSeen ? "Prompt as the model saw it" : "Prompt"),
        element("pre", { dir: "auto" }, visible(isSeen ? group.model_prompt : group.prompt)));
    }

    pane(pane, isGroup) {
      const { row, lists } = pane;
      const made = element("article", { class: "pane" });
      if (isGroup) {
        const open = element("button", {
          type: "button", class: "open-sample", onclick: () => this.openSample(row),
        }, `Sample ${figure(row.sample)}`);
        made.append(element("header", { class: row === this.row ? "chosen" : "" }, open,
          element("span", {}, `reward ${figure(row.reward)}`),
          element("span", {}, `advantage ${figure(row.advantage)}`),
          element("span", {}, `${figure(row.tokens)} tokens`),
          row.one_minus_ess === null ? ""
            : element("span", {}, `1‑ESS ${figure(row.one_minus_ess)}`),
          element("span", {}, visible(row.finish_reason))));
      }
      made.append(lists ? this.tokens(pane) : textOf(row));
      if (!lists) made.append(element("p", { class: "hint" },
        row.group.tokens ? "No token lists were recorded for this sample."
          : "The page has no token lists of this completion."));
      return made;
    }

    openSample(row) {
      this.isGroup = false;
      const place = this.rows.indexOf(row);
      // the filters may hide it: then only its group is turned through
      if (place < 0) this.open(row.group.rows, row.group.rows.indexOf(row));
      else this.open(this.rows, place);
    }

    tokens(pane) {
      const { lists } = pane;
      const box = element("div", { class: "tokens", dir: "auto", role: "group",
        "aria-label": "Tokens", onkeydown: (event) => this.onTokenKey(event) });
      box.pane = pane;
      pane.box = box;
      const add = (first, last) => {
        const spans = lists.token.slice(first, last).map((text, offset) => {
          const place = first + offset;
          const span = element("span", { class: "token", tabindex: place ? "-1" : "0",
            "data-place": String(place) }, visible(text, true));
          if (isOfEnvironment(lists, place)) span.classList.add("environment");
          const versions = lists.token_version;
          const isNew = place && versions && versions[place] !== versions[place - 1];
          if (isNew) span.classList.add("new-version");
          if (!text) span.append(element("span", { class: "odd" }, "∅"));
          return span;
        });
        box.append(...spans);
      };
      const limit = Math.floor(MOST_TOKENS / this.panes.length);
      add(0, limit);
      const left = lists.token.length - limit;
      if (left <= 0) return box;
      const more = element("button", { type: "button", class: "rest", onclick: () => {
        more.remove();
        add(limit, lists.token.length);
        this.paint();
      } }, `Show the other ${figure(left)} tokens`);
      return element("div", {}, box, more);
    }

    showModes() {
      const measured = (mode) => this.panes.some(({ lists }) => lists?.[MODES[mode].list]
        ?.some((value) => value !== null));
      const usable = Object.keys(MODES).filter((mode) => mode === "plain" || measured(mode));
      this.modes.parentElement.hidden = usable.length < 2;
      this.shownMode = usable.includes(this.mode) ? this.mode : usable[0];
      for (const [mode, radio] of Object.entries(this.radios)) {
        radio.parentElement.hidden = !usable.includes(mode);
        radio.checked = mode === this.shownMode;
      }
      this.paint();
    }

    paint() {
      const mode = this.shownMode;
      const kind = MODES[mode];
      const panes = this.panes.filter(({ lists }) => lists);
      const values = panes.map(({ row, lists }) =>
        lists.token.map((_, place) => valueOf(mode, row, lists, place)));
      const end = scaleEnd(kind, values.flat());
      panes.forEach(({ box }, number) => {
        for (const span of box.children) {
          const value = values[number][Number(span.dataset.place)];
          const share = value === null ? 0 : shareOf(kind, value, end);
          const side = kind.isDiverging ? (share < 0 ? "below" : "above") : "amount";
          span.dataset.side = mode === "plain" ? "" : value === null ? "none" : side;
          span.style.setProperty("--share", Math.abs(share).toFixed(3));
        }
      });
      this.showScale(kind, end, panes);
    }

    showScale(kind, end, panes) {
      const { isLog, isDiverging, reading } = kind;
      const low = isLog ? 1 / end : isDiverging ? -end : 0;
      const short = (value) => figure(Number(value.toPrecision(3)));
      const labels = [isDiverging ? `≤ ${short(low)}` : "0"];
      if (isDiverging) labels.push(isLog ? "1" : "0");
      labels.push(`≥ ${short(end)}`);
      const bar = element("div", { class: `scale-colors ${isDiverging ? "diverging" : "amount"}` });
      const has = (test) => panes.some(({ lists }) => lists.token.some((_, i) => test(lists, i)));
      const keys = [];
      if (has(isOfEnvironment)) keys.push(element("span", { class: "color-key" },
        element("span", { class: "token environment" }, "abc"), " said by the environment"));
      if (panes.some(({ lists }) => lists.token_version)) keys.push(element("span",
        { class: "color-key" }, element("span", { class: "token new-version" }, "abc"),
        " first token of a new version"));
      const ends = element("div", { class: "scale-ends" },
        ...labels.map((label) => element("span", {}, label)));
      this.scale.replaceChildren(...(reading ? [element("div", { class: "legend-bar" }, bar, ends),
        element("p", {}, reading)] : []), ...keys);
    }

    explain(token) {
      const { row, lists } = token.closest(".tokens").pane;
      const place = Number(token.dataset.place);
      const versions = lists.token_version;
      const line = (name, value) => element("div", {}, element("span", {}, name),
        element("b", {}, visible(String(value))));
      const isForeign = isOfEnvironment(lists, place);
      const text = lists.token[place];
      const head = element("div", { class: "head" }, element("code", {}, visible(text, true)),
        element("small", {}, `token ${figure(place + 1)} of ${figure(lists.token.length)}`
          + (lists.token_id ? `, id ${lists.token_id[place] ?? "–"}` : "")));
      const { version, engine } = row.source;
      const numbers = isForeign ? [line("said by", "the environment")] : [
        ...NUMBERS.filter(([key]) => lists[key])
          .map(([key, name]) => line(name, figure(lists[key][place]))),
        line("advantage", figure(row.advantage)),
        ...(lists.weight ? [line("advantage × weight",
          figure(valueOf("push", row, lists, place)))] : []),
        line("version", figure(versions?.[place] ?? version)),
        line("sampled by", `${nameOf(row.source)} (${engine ?? "–"})`),
      ];
      this.tip.replaceChildren(head, ...numbers);
      this.tip.hidden = false;
      token.setAttribute("aria-describedby", "token-tip");
      this.placeTip(token.getClientRects()[0] ?? token.getBoundingClientRect());
    }

    placeTip(box) {
      const { offsetWidth, offsetHeight } = this.tip;
      const left = Math.min(box.left, innerWidth - offsetWidth - 8);
      const below = box.bottom + 6;
      const fits = below + offsetHeight < innerHeight - 4;
      this.tip.style.left = `${Math.max(8, left)}px`;
      this.tip.style.top = `${fits ? below : Math.max(4, box.top - offsetHeight - 6)}px`;
    }

    hideTip() {
      this.tip.hidden = true;
      this.body.querySelector("[aria-describedby]")?.removeAttribute("aria-describedby");
    }

    onKey(event) {
      if (!this.dialog.open || event.ctrlKey || event.metaKey || event.altKey) return;
      const act = { j: () => this.turn(1), k: () => this.turn(-1), g: () => this.toggleGroup() };
      act[event.key]?.();
    }

    onTokenKey(event) {
      const token = event.target.closest(".token");
      if (!token) return;
      const box = token.parentElement;
      const next = {
        ArrowRight: () => token.nextSibling, ArrowLeft: () => token.previousSibling,
        Home: () => box.firstChild, End: () => box.lastChild,
        ArrowDown: () => onNextLine(token, "nextSibling"),
        ArrowUp: () => onNextLine(token, "previousSibling"),
      }[event.key]?.();
      if (!next) return;
      event.preventDefault();
      token.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
  }

  /** Return the token above or below. */
  function onNextLine(token, sibling) {
    const start = token.getBoundingClientRect();
    let [best, line] = [null, null];
    for (let other = token[sibling]; other; other = other[sibling]) {
      const box = other.getClientRects()[0];
      if (!box || Math.abs(box.top - start.top) < 4) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) >= 4) break;
      const distance = Math.abs(box.left - start.left);
      if (!best || distance < best.distance) best = { other, distance };
    }
    return best?.other;
  }

  function fact(name, ...values) {
    return element("div", {}, element("dt", {}, name), element("dd", {}, ...values));
  }

  function factsOf(row) {
    const parts = Object.entries(row.parts ?? {})
      .map(([name, value]) => `${name} ${figure(value)}`).join(", ");
    const { environment_tokens: others, source } = row;
    const settings = [source.engine, source.precision, `T ${figure(source.temperature)}`,
      `top-p ${figure(source.top_p)}`, `top-k ${figure(source.top_k)}`].join(" · ");
    return [
      fact("Reward", figure(row.reward), parts ? visible(` (${parts})`) : ""),
      ...(row.ungraded === null ? [] : [fact("Not graded", visible(String(row.ungraded)))]),
      fact("Advantage", figure(row.advantage)),
      fact("Answer", visible(String(row.group.answer ?? "–"))),
      fact("Length", `${figure(row.tokens)} tokens`,
        others ? `, and ${figure(others)} of the environment` : ""),
      fact("Ending", visible(row.finish_reason || "–")),
      fact("1‑ESS", figure(row.one_minus_ess)),
      fact("Mean log-prob", figure(row.mean_behavior_logp),
        visible(` (${source.logprob_mode ?? "–"})`)),
      fact("Sampled by", visible(row.origin), element("small", {}, visible(` ${settings}`))),
      ...runFacts(row),
    ];
  }

  function groupFacts(row) {
    const rewards = row.group.rows.map((each) => each.reward).filter((each) => each !== null);
    const mean = rewards.reduce((sum, each) => sum + each, 0) / rewards.length;
    return [
      fact("Answer", visible(String(row.group.answer ?? "–"))),
      fact("Samples", figure(row.group.rows.length)),
      fact("Mean reward", figure(rewards.length ? mean : null)),
      ...runFacts(row),
    ];
  }

  function runFacts(row) {
    return row.isOneOfRuns ? [fact("Run", visible(row.runName))] : [];
  }

  /** Return a completion without tokens: its text, or the turns of an episode. */
  function textOf(row) {
    if (!row.turns) return element("pre", { dir: "auto" }, visible(row.completion));
    return element("div", {}, ...row.turns.map(({ role, text }) =>
      element("div", { class: `turn ${role === "policy" ? "policy" : "reply"}` },
        element("small", {}, visible(role)), element("pre", { dir: "auto" }, visible(text)))));
  }

  return { element, figure, nameOf, visible, CompletionDialog };
})();
