// The tooltip: of an event of a timeline, and of a term, whose meaning stands at the end of the page.
const Tip = {
  get element() { return document.getElementById("tip"); },

  show(text, x, y) {
    const tip = this.element;
    tip.hidden = false;
    tip.textContent = text;
    const { offsetWidth: wide, offsetHeight: high } = tip;
    tip.style.left = `${Math.max(4, Math.min(x, innerWidth - wide - 8))}px`;
    tip.style.top = `${y + 16 + high > innerHeight ? Math.max(4, y - high - 12) : y + 16}px`;
  },

  hide() { this.element.hidden = true; },

  showTerm(term) {
    const box = term.getBoundingClientRect();
    this.show(document.getElementById(`term-${term.dataset.term}`).textContent, box.left, box.bottom - 10);
  },

  // Pointed at by a mouse, focused by keys, or tapped, which focuses too.
  listen() {
    const find = (event) => event.target.closest?.(".term");
    const focused = () => document.activeElement?.closest?.(".term");
    const restore = () => { if (focused()) this.showTerm(focused()); else this.hide(); };
    addEventListener("pointerover", (event) => { if (event.pointerType === "mouse" && find(event)) this.showTerm(find(event)); });
    addEventListener("pointerout", (event) => { if (event.pointerType === "mouse" && find(event)) restore(); });
    addEventListener("focusin", (event) => { if (find(event)) this.showTerm(find(event)); });
    addEventListener("focusout", (event) => { if (find(event)) this.hide(); });
    addEventListener("keydown", (event) => { if (event.key === "Escape" && focused()) this.hide(); });
    addEventListener("scroll", restore, { passive: true });
  },
};
