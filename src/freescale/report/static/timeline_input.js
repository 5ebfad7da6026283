// Input of a timeline: wheel, mouse, fingers, keys; and the tooltip of an event.
Object.assign(Timeline.prototype, {
  listen() {
    const { svg } = this;
    this.select.addEventListener("change", () => { this.selectEvent(null); this.showSteps(this.select.value); });
    svg.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    svg.addEventListener("pointerdown", (event) => this.onPointerDown(event));
    svg.addEventListener("pointermove", (event) => this.onPointerMove(event));
    for (const name of ["pointerup", "pointercancel"]) svg.addEventListener(name, (event) => this.onPointerUp(event));
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && !this.selected) this.showTip(null); });
    svg.addEventListener("dblclick", (event) => this.zoom(0.5, this.toTime(this.pointerX(event))));
    svg.addEventListener("keydown", (event) => this.onKey(event));
    svg.addEventListener("blur", () => this.selectEvent(null));
  },

  pointerX(event) { return event.clientX - this.svg.getBoundingClientRect().left; },

  onWheel(event) {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan(event.deltaX / this.width);
      return;
    }
    const whole = this.view[1] - this.view[0] >= this.limits[1] - this.limits[0];
    if (event.deltaY > 0 && whole) return; // nothing left to zoom out: the page scrolls on
    event.preventDefault();
    this.zoom(Math.exp(Math.max(-100, Math.min(100, event.deltaY)) / 300), this.toTime(this.pointerX(event)));
  },

  // ---- mouse and fingers. One pans (or, on the ruler and with shift, selects a range), two zoom.

  onPointerDown(event) {
    if (event.button) return;
    const x = this.pointerX(event);
    this.pointers.set(event.pointerId, x);
    this.svg.setPointerCapture(event.pointerId);
    this.grip = { x, view: [...this.view], ruler: Boolean(event.target.closest?.(".ruler")) || event.shiftKey, moved: false };
    if (this.pointers.size === 2) this.grip.times = [...this.pointers.values()].map((at) => this.toTime(at));
  },

  onPointerMove(event) {
    if (!this.pointers.has(event.pointerId)) {
      if (event.pointerType === "mouse") this.showTipAt(event);
      return;
    }
    const x = this.pointerX(event);
    this.pointers.set(event.pointerId, x);
    const { grip } = this;
    if (Math.abs(x - grip.x) > 4) grip.moved = true;
    if (this.pointers.size === 2) return this.pinch();
    if (!grip.moved) return;
    this.showTip(null);
    if (grip.ruler) return this.drawSelection(grip.x, x);
    const by = ((grip.x - x) / this.width) * (grip.view[1] - grip.view[0]);
    this.showRange(grip.view[0] + by, grip.view[1] + by);
  },

  onPointerUp(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    const { grip } = this;
    this.svg.querySelector(".picked")?.remove();
    const x = this.pointerX(event);
    if (event.type === "pointerup" && grip.moved && grip.ruler) {
      const ends = [this.toTime(grip.x), this.toTime(x)].sort((a, b) => a - b);
      this.showRange(...ends);
    }
    if (!grip.moved && event.pointerType !== "mouse") this.showTipAt(event); // a tap
  },

  pinch() {
    const [a, b] = [...this.pointers.values()];
    const [first, second] = this.grip.times;
    if (Math.abs(b - a) < 8) return;
    const length = (this.width * (second - first)) / (b - a);
    if (length <= 0) return;
    const from = first - ((a - this.left) / this.width) * length;
    this.showRange(from, from + length);
  },

  drawSelection(from, to) {
    this.svg.querySelector(".picked")?.remove();
    const high = this.svg.getAttribute("height");
    this.createElement("rect", { class: "picked", x: Math.min(from, to), y: 0, width: Math.abs(to - from), height: high }, this.svg);
  },

  showTipAt(event) {
    const under = document.elementFromPoint(event.clientX, event.clientY);
    this.showTip(under?.event ?? null, event.clientX, event.clientY);
  },

  // ---- keys: arrows go through the events of a lane and from lane to lane

  onKey(event) {
    const actions = { "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", 0: "reset", Home: "reset" };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const across = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key in actions) this.runAction(actions[event.key]);
    else if (sideways && event.shiftKey) this.pan(0.25 * sideways);
    else if (sideways) this.selectNeighbour(sideways);
    else if (across) this.selectLane(across);
    else if (event.key === "Escape") this.selectEvent(null);
    else return;
    event.preventDefault();
  },

  isInside(event) { return event[4] + event[5] > this.limits[0] && event[4] < this.limits[1]; },

  selectNeighbour(by) {
    const lane = this.selected ? `${this.selected[0]} ${this.selected[1]}` : `${this.data.ranks[0]} compute`;
    const events = (this.byLane.get(lane) ?? []).filter((event) => this.isInside(event));
    const next = this.selected ? events.indexOf(this.selected) + by : 0;
    if (events[next]) this.selectEvent(events[next]);
  },

  selectLane(by) {
    if (!this.selected) return this.selectNeighbour(1);
    const lanes = this.data.ranks.flatMap((rank) => this.data.lanes.map(([lane]) => `${rank} ${lane}`));
    const at = this.selected[4];
    for (let place = lanes.indexOf(`${this.selected[0]} ${this.selected[1]}`) + by; lanes[place]; place += by) {
      const events = (this.byLane.get(lanes[place]) ?? []).filter((event) => this.isInside(event));
      if (!events.length) continue;
      return this.selectEvent(events.reduce((best, event) => (Math.abs(event[4] - at) < Math.abs(best[4] - at) ? event : best)));
    }
  },

  /** Selects an event for the keyboard, brings it into view and shows its tooltip; null ends the selection. */
  selectEvent(event) {
    if (!event && !this.selected) return;
    this.selected = event;
    if (!event) { this.showTip(null); return this.scheduleDraw(); }
    const length = this.view[1] - this.view[0];
    if (event[4] + event[5] < this.view[0] || event[4] > this.view[1]) this.showRange(event[4] - length / 4, event[4] + (3 * length) / 4);
    cancelAnimationFrame(this.frame);
    this.draw();
    const box = this.svg.querySelector(".on")?.getBoundingClientRect();
    if (box) this.showTip(event, box.left + Math.min(box.width, 40), box.bottom);
  },

  // ---- the tooltip

  showTip(event, x, y) {
    if (event) Tip.show(this.describeEvent(event).join("\n"), x + 12, y);
    else Tip.hide();
  },

  describeEvent([rank, lane, , name, begin, lasts, more]) {
    const ms = (time) => (time < 10 ? `${time.toFixed(1)} \u00b5s` : `${(time / 1e3).toFixed(3)} ms`);
    const size = (bytes) => `${bytes.toLocaleString("en")} bytes`;
    const titles = { straggler: "waits for the slowest rank", exposed: "exposed communication" };
    const lines = [more.for ? `${titles[name]} (${more.for})` : name, `rank ${rank}, ${lane}`, `lasts ${ms(lasts)}`];
    lines.push(`begins at ${((begin - this.limits[0]) / 1e3).toFixed(3)} ms`);
    if (more.sent != null) lines.push(`sends ${size(more.sent)}, receives ${size(more.received)}`);
    if (more.path) lines.push(`path: ${more.path}`);
    if (more.wait != null) lines.push(more.wait > 0 ? `compute waited ${ms(more.wait)} for it` : "nobody waited for it");
    return lines;
  },
});
