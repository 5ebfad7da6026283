// How a person handles a timeline: wheel, mouse, fingers, keys; and what it says about an event.
Object.assign(Timeline.prototype, {
  listen() {
    const { svg } = this;
    this.select.addEventListener("change", () => { this.pick(null); this.choose(this.select.value); });
    svg.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    svg.addEventListener("pointerdown", (event) => this.down(event));
    svg.addEventListener("pointermove", (event) => this.moved(event));
    for (const name of ["pointerup", "pointercancel"]) svg.addEventListener(name, (event) => this.up(event));
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && !this.chosen) this.say(null); });
    svg.addEventListener("dblclick", (event) => this.zoom(0.5, this.time(this.place(event))));
    svg.addEventListener("keydown", (event) => this.key(event));
    svg.addEventListener("blur", () => this.pick(null));
    addEventListener("scroll", () => { this.tip.hidden = true; }, { passive: true });
  },

  place(event) { return event.clientX - this.svg.getBoundingClientRect().left; },

  wheel(event) {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.move(event.deltaX / this.width);
      return;
    }
    const whole = this.view[1] - this.view[0] >= this.limits[1] - this.limits[0];
    if (event.deltaY > 0 && whole) return; // nothing left to zoom out: the page scrolls on
    event.preventDefault();
    this.zoom(Math.exp(Math.max(-100, Math.min(100, event.deltaY)) / 300), this.time(this.place(event)));
  },

  // ---- mouse and fingers. One moves (or, on the ruler and with shift, picks a part), two zoom.

  down(event) {
    if (event.button) return;
    const x = this.place(event);
    this.pointers.set(event.pointerId, x);
    this.svg.setPointerCapture(event.pointerId);
    this.grip = { x, view: [...this.view], ruler: Boolean(event.target.closest?.(".ruler")) || event.shiftKey, went: false };
    if (this.pointers.size === 2) this.grip.times = [...this.pointers.values()].map((at) => this.time(at));
  },

  moved(event) {
    if (!this.pointers.has(event.pointerId)) {
      if (event.pointerType === "mouse") this.hover(event);
      return;
    }
    const x = this.place(event);
    this.pointers.set(event.pointerId, x);
    const { grip } = this;
    if (Math.abs(x - grip.x) > 4) grip.went = true;
    if (this.pointers.size === 2) return this.pinch();
    if (!grip.went) return;
    this.say(null);
    if (grip.ruler) return this.part(grip.x, x);
    const by = ((grip.x - x) / this.width) * (grip.view[1] - grip.view[0]);
    this.show(grip.view[0] + by, grip.view[1] + by);
  },

  up(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    const { grip } = this;
    this.svg.querySelector(".picked")?.remove();
    const x = this.place(event);
    if (event.type === "pointerup" && grip.went && grip.ruler) {
      const ends = [this.time(grip.x), this.time(x)].sort((a, b) => a - b);
      this.show(...ends);
    }
    if (!grip.went && event.pointerType !== "mouse") this.hover(event); // a tap
  },

  pinch() {
    const [a, b] = [...this.pointers.values()];
    const [first, second] = this.grip.times;
    if (Math.abs(b - a) < 8) return;
    const length = (this.width * (second - first)) / (b - a);
    if (length <= 0) return;
    const from = first - ((a - this.left) / this.width) * length;
    this.show(from, from + length);
  },

  part(from, to) {
    this.svg.querySelector(".picked")?.remove();
    const high = this.svg.getAttribute("height");
    this.make("rect", { class: "picked", x: Math.min(from, to), y: 0, width: Math.abs(to - from), height: high }, this.svg);
  },

  hover(event) {
    const under = document.elementFromPoint(event.clientX, event.clientY);
    this.say(under?.event ?? null, event.clientX, event.clientY);
  },

  // ---- keys: arrows walk through the events of a lane and from lane to lane

  key(event) {
    const actions = { "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", 0: "reset", Home: "reset" };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const across = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key in actions) this.act(actions[event.key]);
    else if (sideways && event.shiftKey) this.move(0.25 * sideways);
    else if (sideways) this.walk(sideways);
    else if (across) this.change(across);
    else if (event.key === "Escape") this.pick(null);
    else return;
    event.preventDefault();
  },

  inside(event) { return event[4] + event[5] > this.limits[0] && event[4] < this.limits[1]; },

  walk(by) {
    const lane = this.chosen ? `${this.chosen[0]} ${this.chosen[1]}` : `${this.data.ranks[0]} compute`;
    const events = (this.byLane.get(lane) ?? []).filter((event) => this.inside(event));
    const next = this.chosen ? events.indexOf(this.chosen) + by : 0;
    if (events[next]) this.pick(events[next]);
  },

  change(by) {
    if (!this.chosen) return this.walk(1);
    const lanes = this.data.ranks.flatMap((rank) => this.data.lanes.map(([lane]) => `${rank} ${lane}`));
    const at = this.chosen[4];
    for (let place = lanes.indexOf(`${this.chosen[0]} ${this.chosen[1]}`) + by; lanes[place]; place += by) {
      const events = (this.byLane.get(lanes[place]) ?? []).filter((event) => this.inside(event));
      if (!events.length) continue;
      return this.pick(events.reduce((best, event) => (Math.abs(event[4] - at) < Math.abs(best[4] - at) ? event : best)));
    }
  },

  /** Makes an event the current one of the keyboard, brings it into view and says what it is. */
  pick(event) {
    if (!event && !this.chosen) return;
    this.chosen = event;
    if (!event) { this.say(null); return this.redraw(); }
    const length = this.view[1] - this.view[0];
    if (event[4] + event[5] < this.view[0] || event[4] > this.view[1]) this.show(event[4] - length / 4, event[4] + (3 * length) / 4);
    cancelAnimationFrame(this.frame);
    this.draw();
    const box = this.svg.querySelector(".on")?.getBoundingClientRect();
    if (box) this.say(event, box.left + Math.min(box.width, 40), box.bottom);
  },

  // ---- what it is

  say(event, x, y) {
    const { tip } = this;
    tip.hidden = !event;
    if (!event) return;
    tip.textContent = this.words(event).join("\n");
    const { offsetWidth: wide, offsetHeight: high } = tip;
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - wide - 8))}px`;
    tip.style.top = `${y + 16 + high > innerHeight ? Math.max(4, y - high - 12) : y + 16}px`;
  },

  words([rank, lane, , name, begin, lasts, more]) {
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
