// Draws some steps of a run: a group of lanes per rank, time from left to right. Times are in microseconds.
// An event is [rank, lane, row, name, begin, duration, more], as report/timeline.py makes it.
class Timeline {
  static COMPUTE = 24;
  static ROW = 13;
  static GAP = 4;
  static RULER = 24;
  static SHORTEST_RANGE = 20; // how far it zooms in

  static pairLength(data) {
    const last = Math.min(data.pick + 1, data.steps.length - 1);
    return data.steps[last][2] - data.steps[data.pick][1];
  }

  constructor(root, data, common) {
    Object.assign(this, { root, data, common, selected: null, frame: 0, pointers: new Map() });
    this.byLane = new Map(); // "rank lane" -> events, in the order of time
    for (const event of data.events) {
      const key = `${event[0]} ${event[1]}`;
      if (!this.byLane.has(key)) this.byLane.set(key, []);
      this.byLane.get(key).push(event);
    }
    this.build();
    this.showSteps(data.pick);
    this.listen();
    new ResizeObserver(() => this.scheduleDraw()).observe(root);
  }

  // ---- elements

  createElement(name, attributes, parent, words) {
    const svg = ["svg", "g", "rect", "line", "text"].includes(name);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (words !== undefined) node.textContent = words;
    if (parent) parent.append(node);
    return node;
  }

  build() {
    const tools = this.createElement("div", { class: "tools" }, this.root);
    this.select = this.createElement("select", { "aria-label": "Steps to show" }, tools);
    const { steps } = this.data;
    for (let place = 0; place + 1 < steps.length; place++)
      this.createElement("option", { value: place }, this.select, `steps ${steps[place][0]} and ${steps[place + 1][0]}`);
    this.createElement("option", { value: "all" }, this.select, steps.length > 1 ? `all ${steps.length} here` : `step ${steps[0][0]}`);
    const buttons = { "zoom-in": ["+", "Zoom in"], "zoom-out": ["\u2212", "Zoom out"], left: ["\u25c0", "Earlier"], right: ["\u25b6", "Later"], reset: ["All", "Show all"] };
    for (const [action, [words, label]] of Object.entries(buttons)) {
      const button = this.createElement("button", { type: "button", "data-action": action, "aria-label": label, title: label }, tools, words);
      button.addEventListener("click", () => this.runAction(action));
    }
    this.range = this.createElement("span", {}, tools);
    const label = `Timeline of ${this.root.dataset.name}. Arrow keys walk through what happened, plus and minus zoom, shift with an arrow moves, 0 shows all.`;
    this.svg = this.createElement("svg", { tabindex: 0, role: "application", "aria-label": label }, this.root);
    this.buildLegend();
    const { ranks, of, traced } = this.data;
    const some = ranks.length < of ? `${ranks.length} of ${of} ranks, the slowest among them. ` : "";
    this.createElement("p", { class: "help" }, this.root, `${some}${steps.length} of the trace's ${traced} steps are here.`);
  }

  buildLegend() {
    const names = [...new Set(this.data.events.map((event) => event[3]))];
    const words = { straggler: "bubble: waits for the slowest rank", exposed: "bubble: exposed communication" };
    const list = this.createElement("ul", { class: "legend" }, this.root);
    for (const name of names.sort((a, b) => (a in words) - (b in words))) {
      const item = this.createElement("li", {}, list);
      this.createElement("i", { class: Timeline.colourClass(name) }, item);
      item.append(this.explain(words[name] ?? name, name));
    }
  }

  /** Words with the meaning of a name in the timeline, where the glossary has it. */
  explain(words, name) {
    const slug = JSON.parse(document.body.dataset.terms)[name];
    if (!slug) return words;
    const attributes = { class: "term", tabindex: 0, "data-term": slug, "aria-describedby": `term-${slug}` };
    return this.createElement("span", attributes, null, words);
  }

  static colourClass(name) {
    const slug = name.replaceAll(" ", "-");
    return `k-${document.body.dataset.coloured.split(" ").includes(slug) ? slug : "other"}`;
  }

  // ---- what is shown

  showSteps(place) {
    const { steps } = this.data;
    const all = place === "all" || steps.length < 2;
    const first = all ? 0 : Number(place);
    const last = all ? steps.length - 1 : first + 1;
    this.select.value = all ? "all" : String(first);
    const from = steps[first][1];
    this.limits = [from, from + Math.max(steps[last][2] - from, all ? 0 : this.common)];
    this.showRange(...this.limits);
  }

  showRange(from, to) {
    const [low, high] = this.limits;
    const length = Math.min(Math.max(to - from, Timeline.SHORTEST_RANGE), high - low);
    from = Math.min(Math.max(from, low), high - length);
    this.view = [from, from + length];
    this.scheduleDraw();
  }

  zoom(factor, at) {
    const [from, to] = this.view;
    const centre = at ?? (from + to) / 2;
    this.showRange(centre - (centre - from) * factor, centre + (to - centre) * factor);
  }

  pan(share) {
    const by = (this.view[1] - this.view[0]) * share;
    this.showRange(this.view[0] + by, this.view[1] + by);
  }

  runAction(action) {
    if (action === "zoom-in") this.zoom(0.5);
    if (action === "zoom-out") this.zoom(2);
    if (action === "left") this.pan(-0.25);
    if (action === "right") this.pan(0.25);
    if (action === "reset") this.showRange(...this.limits);
  }

  // ---- drawing

  scheduleDraw() {
    this.root.dataset.from = this.view[0];
    this.root.dataset.to = this.view[1];
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  toX(time) { return this.left + ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.width; }
  toTime(x) { return this.view[0] + ((x - this.left) / this.width) * (this.view[1] - this.view[0]); }

  draw() {
    const { svg, data } = this;
    const wide = this.root.clientWidth;
    this.left = wide < 560 ? 74 : 108;
    this.width = Math.max(60, wide - this.left - 4);
    svg.replaceChildren();
    const lanes = this.createElement("g", {}, svg);
    let y = Timeline.RULER;
    data.ranks.forEach((rank, place) => {
      const top = y;
      for (const [lane, rows] of data.lanes) {
        const high = lane === "compute" ? Timeline.COMPUTE : rows * Timeline.ROW;
        this.createElement("rect", { class: "lane", x: this.left, y, width: this.width, height: high }, lanes);
        const words = lane === "compute" ? `rank ${rank}` : wide < 560 ? lane.replace("communication", "comm.") : lane;
        this.createElement("text", { class: lane === "compute" ? "rank" : "", x: 0, y: y + high / 2 + 4 }, lanes, words);
        this.drawEvents(lanes, this.byLane.get(`${rank} ${lane}`) ?? [], y);
        y += high + Timeline.GAP;
      }
      for (const start of data.starts[place]) this.drawStepStart(lanes, start, top - 2, y - Timeline.GAP);
      y += 8;
    });
    svg.setAttribute("viewBox", `0 0 ${wide} ${y}`);
    svg.setAttribute("height", y);
    this.drawRuler();
    const [from, to] = this.view.map((time) => (time - this.limits[0]) / 1e3);
    this.range.textContent = `${from.toFixed(2)} to ${to.toFixed(2)} ms`;
  }

  drawEvents(parent, events, top) {
    const right = this.left + this.width;
    // Bubbles last: they lie over the span that waits.
    const bubble = (event) => event[6].for !== undefined;
    for (const event of [...events].sort((a, b) => bubble(a) - bubble(b))) {
      const [, lane, row, name, begin, lasts] = event;
      const a = Math.max(this.toX(begin), this.left);
      const b = Math.min(this.toX(begin + lasts), right);
      if (b < this.left || a > right) continue;
      const compute = lane === "compute";
      const y = top + (compute ? 0 : row * Timeline.ROW);
      const high = compute ? Timeline.COMPUTE : Timeline.ROW - 1;
      const on = event === this.selected ? " on" : "";
      const rect = this.createElement("rect", { class: `event ${Timeline.colourClass(name)}${on}`, x: a, y, width: Math.max(0.8, b - a), height: high }, parent);
      rect.event = event;
      if (b - a > 7 * name.length + 4 && !bubble(event)) {
        const bright = ["forward", "balance", "gradients", "update rows", "optimizer", "samples"].includes(name) ? " bright" : "";
        this.createElement("text", { class: `in${bright}`, x: (a + b) / 2, y: y + high / 2 + 4, "text-anchor": "middle" }, parent, name);
      }
    }
  }

  drawStepStart(parent, time, top, bottom) {
    const x = this.toX(time);
    if (x >= this.left && x <= this.left + this.width) this.createElement("line", { class: "step", x1: x, x2: x, y1: top, y2: bottom }, parent);
  }

  drawRuler() {
    const group = this.createElement("g", { class: "ruler" }, this.svg);
    this.createElement("rect", { x: this.left, y: 0, width: this.width, height: Timeline.RULER, fill: "transparent" }, group);
    const most = Math.max(2, Math.floor(this.width / 80));
    const rough = (this.view[1] - this.view[0]) / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const unit = power * [1, 2, 5, 10].find((factor) => power * factor >= rough);
    const [from, to] = this.view.map((time) => time - this.limits[0]);
    const digits = Math.max(0, 3 - Math.floor(Math.log10(unit) + 1e-9));
    for (let tick = Math.ceil(from / unit); tick * unit <= to; tick++) {
      const x = this.toX(tick * unit + this.limits[0]);
      this.createElement("line", { class: "axis", x1: x, x2: x, y1: 17, y2: 21 }, group);
      const anchor = x > this.left + this.width - 24 ? "end" : x < this.left + 12 ? "start" : "middle";
      this.createElement("text", { x, y: 13, "text-anchor": anchor }, group, (tick * unit / 1e3).toFixed(digits));
    }
    this.createElement("text", { x: 0, y: 13 }, group, "ms");
  }
}
