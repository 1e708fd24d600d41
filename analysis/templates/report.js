// Draws every figure as wide as the page allows: as many panels side by side as fit, each as wide as is left for it.
// Where this does not run, the page shows the same figures as images.
const WIDEST_PANEL = 580, NARROWEST_PANEL = 300, TWO_PANELS = 720;

function fitted(spec, columns, panelWidth) {
  const copy = structuredClone(spec);
  copy.columns = columns;
  copy.spec.width = panelWidth;
  if (columns === 1) copy.config.legend.columns = 2;
  return copy;
}

async function draw(figure) {
  const place = figure.querySelector(".chart");
  const label = place.querySelector("img")?.alt ?? place.getAttribute("aria-label");
  const spec = JSON.parse(figure.querySelector(".spec").textContent);
  const available = place.clientWidth;
  const panels = spec.facet.sort.length;
  const columns = available < TWO_PANELS ? 1 : Math.min(2, panels);
  const options = { mode: "vega-lite", renderer: "svg", actions: false, tooltip: true };
  // What axes, their labels and gaps take is known only once drawn: draw, measure, and draw again with what is left.
  let panelWidth = Math.min(NARROWEST_PANEL, available * 0.6);
  for (const last of [false, true]) {
    await vegaEmbed(place, fitted(spec, columns, panelWidth), options);
    const around = place.querySelector("svg").getBBox().width - columns * panelWidth;
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", label);
    if (!last) panelWidth = Math.max(120, Math.min(WIDEST_PANEL, (available - around - 12) / columns));
  }
}

const figures = [...document.querySelectorAll("figure")].filter((figure) => figure.querySelector(".spec"));
const drawAll = async () => { for (const figure of figures) await draw(figure); };
let width = window.innerWidth, timer;
window.addEventListener("resize", () => {
  clearTimeout(timer);
  timer = setTimeout(() => { if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); } }, 200);
});
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
drawAll();
