// The page around the timelines: their start, and light or dark.
(() => {
  Tip.listen();
  const drawn = JSON.parse(document.getElementById("timelines").textContent);
  // Runs next to each other have one scale: the shorter step looks shorter.
  const common = Math.max(0, ...drawn.filter(Boolean).map((data) => Timeline.pairLength(data)));
  document.querySelectorAll(".timeline").forEach((root) => {
    const data = drawn[Number(root.dataset.run)];
    if (data) new Timeline(root, data, common);
  });

  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : system.matches);
  const show = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; show(); });
  system.addEventListener("change", show);
  show();
})();
