// Draws every figure as wide as the page allows: as many panels side by side as fit, each as wide as is left for it.
// Where this does not run, the page shows the images that lie beside it, and no filter.
const WIDEST_PANEL = 580, NARROWEST_PANEL = 300, TWO_PANELS = 720;

const form = document.querySelector("#filter");
const configurations = JSON.parse(document.querySelector("#index").textContent);
const keyOf = (row) => `${row.group}\n${row.configuration}`;
let specs; // figure → Vega-Lite, as JSON

// What the page carries compressed, as text.
async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.querySelector(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

// What the filter leaves: a configuration must have one of the chosen values wherever any is chosen.
function chosen() {
  const wanted = new Map();
  for (const [name, value] of form ? new FormData(form) : []) wanted.set(name, (wanted.get(name) ?? new Set()).add(value));
  const left = configurations.filter((row) => [...wanted].every(([name, values]) => values.has(row[name])));
  return { all: wanted.size === 0, count: left.length, keys: new Set(left.map(keyOf)) };
}

function filterTables(choice) {
  for (const body of document.querySelectorAll("tbody[data-group]")) {
    const rows = [...body.querySelectorAll("tr[data-configuration]")];
    for (const row of rows) row.hidden = !choice.keys.has(keyOf({ ...body.dataset, ...row.dataset }));
    body.hidden = rows.every((row) => row.hidden);
  }
  for (const row of document.querySelectorAll("tr[data-groups]")) {
    const { groups, configuration } = row.dataset; // of runs of several lengths
    row.hidden = !JSON.parse(groups).some((group) => choice.keys.has(keyOf({ group, configuration })));
  }
  if (form) form.querySelector("output").textContent =
    choice.all ? "" : choice.count === 0 ? "No configuration has all of these." :
    `Shown: ${choice.count} of ${configurations.length} configurations.`;
}

// The figure's rows that are chosen. Rows of no configuration, such as an ideal line, stay beside those that they explain.
function filterRows(rows, choice) {
  if (choice.all) return rows;
  const named = rows.filter((row) => row.configuration != null);
  const kept = named.filter((row) => choice.keys.has(keyOf(row)));
  const variants = new Set(named.map((row) => row.variant));
  const shown = new Set(kept.flatMap((row) => [row.panel, `${row.panel}\n${row.variant}`]));
  const explains = (row) => shown.has(variants.has(row.variant) ? `${row.panel}\n${row.variant}` : row.panel);
  return rows.filter((row) => (row.configuration == null ? explains(row) : choice.keys.has(keyOf(row))));
}

// Legends name only what is drawn; what is drawn keeps its colour.
function pruneScales(node, before, after) {
  if (node === null || typeof node !== "object") return;
  if (Array.isArray(node.domain) && Array.isArray(node.range) && node.domain.some((name) => before.has(name))) {
    const stays = node.domain.map((name) => after.has(name) || !before.has(name));
    node.range = node.range.filter((_, index) => stays[index]);
    node.domain = node.domain.filter((_, index) => stays[index]);
  }
  for (const child of Object.values(node)) pruneScales(child, before, after);
}

function filtered(spec, choice) {
  const names = (rows) => new Set(rows.flatMap((row) => [row.variant, row.configuration]));
  const panels = new Set();
  for (const [name, rows] of Object.entries(spec.datasets)) {
    const kept = filterRows(rows, choice);
    pruneScales(spec.spec, names(rows), names(kept));
    for (const row of kept) panels.add(row.panel);
    spec.datasets[name] = kept;
  }
  return panels;
}

function fitted(spec, columns, panelWidth, legendColumns) {
  const copy = structuredClone(spec);
  copy.columns = columns;
  copy.spec.width = panelWidth;
  if (columns === 1) {
    copy.config.legend.columns = legendColumns;
    copy.facet.header.labelFontSize = 11; // a heading wider than the panel would shrink the whole figure
  }
  return copy;
}

// Vega-Lite warns that layers of a panel might be of different data. They are always parts of the same rows.
const warn = console.warn;
console.warn = (...words) => words.join(" ").includes("faceted independent scales") || warn.apply(console, words);

// Panels in parts that fit a screen, each with its legend: whole works, so that panels of a kind lie below each other.
const PANELS_OF_A_PART = 4, BETWEEN = " — ";
const workOf = (panel) => String(panel).split(BETWEEN)[0];

function partsOf(panels) {
  const works = new Map();
  for (const panel of panels) works.set(workOf(panel), [...(works.get(workOf(panel)) ?? []), panel]);
  const parts = [];
  const ofWorks = works.size > 1 ? [...works.values()] : panels.map((panel) => [panel]);
  for (const more of ofWorks) {
    const last = parts.at(-1);
    if (last && last.length + more.length <= PANELS_OF_A_PART) last.push(...more);
    else parts.push([...more]);
  }
  return parts;
}

// `whole`: its legend names what other parts draw, too.
function part(spec, panels, whole = false) {
  const wanted = new Set(panels);
  const names = (rows) => new Set(rows.flatMap((row) => [row.variant, row.configuration]));
  const { datasets, ...rest } = spec;
  const copy = structuredClone(rest);
  copy.datasets = {};
  for (const [name, rows] of Object.entries(datasets)) {
    copy.datasets[name] = rows.filter((row) => wanted.has(row.panel));
    if (!whole) pruneScales(copy.spec, names(rows), names(copy.datasets[name]));
  }
  copy.facet.sort = panels;
  return copy;
}

// Where a part is drawn: the first one stands open, the others are a click away.
function placeOf(chart, panels, index) {
  const place = document.createElement("div");
  place.className = "part";
  if (index === 0) return chart.appendChild(place);
  const folded = document.createElement("details"), summary = document.createElement("summary");
  folded.className = "part-of";
  summary.textContent = `Further panels: ${[...new Set(panels.map(chart.works > 1 ? workOf : String))].join("; ")}`;
  folded.append(summary, place);
  chart.append(folded);
  return place;
}

// Panels that share their axes do so in all parts: each part's axes reach as far as those of the whole figure.
function withSharedAxes(spec) {
  if (spec.resolve?.scale) return spec;
  const rows = Object.values(spec.datasets).flat();
  for (const channel of ["x", "y"]) {
    const coded = (spec.spec.layer ?? [spec.spec]).map((layer) => layer.encoding?.[channel])
      .filter((code) => code?.type === "quantitative" && code.field && !code.scale?.domain);
    const values = rows.flatMap((row) => coded.map((code) => row[code.field])).filter(Number.isFinite);
    if (values.length === 0) continue;
    const zero = channel === "y" && coded.some((code) => code.scale?.zero !== false && code.scale?.type !== "log");
    const low = values.reduce((a, b) => Math.min(a, b), zero ? 0 : Infinity);
    const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    for (const code of coded) code.scale = { nice: true, ...code.scale, domain: [low, high], domainMin: undefined };
  }
  return spec;
}

async function draw(figure, choice) {
  const chart = figure.querySelector(".chart");
  const spec = JSON.parse(specs[figure.dataset.figure]);
  const left = filtered(spec, choice);
  figure.classList.toggle("empty", left.size === 0);
  figure.dataset.empty = left.size > 0 ? "" : choice.count === 0 ? "all" : spec.usermeta?.omitted ? "elsewhere" : "here";
  chart.replaceChildren();
  const panels = spec.facet.sort.filter((panel) => left.has(panel));
  chart.works = new Set(panels.map(workOf)).size;
  const parts = partsOf(panels);
  if (parts.length > 1) withSharedAxes(spec);
  for (const [index, some] of parts.entries()) await drawPart(placeOf(chart, some, index), part(spec, some));
}

const OPTIONS = { mode: "vega-lite", renderer: "svg", actions: false, tooltip: true };

async function drawPart(place, spec) {
  // Folded ones have no width of their own yet.
  const available = place.closest("section").clientWidth;
  const columns = available < TWO_PANELS ? 1 : Math.min(2, spec.facet.sort.length);
  const drawn = async (panelWidth, legendColumns) => {
    await vegaEmbed(place, fitted(spec, columns, panelWidth, legendColumns), OPTIONS);
    return place.querySelector("svg").viewBox.baseVal.width;
  };
  // What axes, their labels and gaps take is known only once drawn: draw, measure, and draw again with what is left.
  const guess = Math.min(NARROWEST_PANEL, available * 0.6);
  let legendColumns = 2, width = await drawn(guess, legendColumns);
  if (columns === 1 && width > available) width = await drawn(guess, legendColumns = 1);
  const rest = (available - (width - columns * guess) - 2) / columns;
  await drawn(Math.max(120, Math.min(WIDEST_PANEL, rest)), legendColumns);
}

const figures = [...document.querySelectorAll("figure[data-figure]")];
let latest = 0, drawing = Promise.resolve();

function inView(figure) {
  const { top, bottom } = figure.getBoundingClientRect();
  return bottom > 0 && top < window.innerHeight;
}

function drawAll() {
  const turn = ++latest, choice = chosen();
  filterTables(choice);
  document.body.dataset.drawn = "";
  drawing = drawing.then(async () => {
    const left = new Set(figures);
    while (left.size > 0) { // what the reader looks at comes first
      if (turn !== latest) return; // the reader has chosen again: that drawing follows
      const figure = [...left].find(inView) ?? left.values().next().value;
      left.delete(figure);
      await draw(figure, choice);
      performance.mark("drawn", { detail: figure.dataset.figure });
      await new Promise((go) => setTimeout(go)); // scrolling and clicks come between two figures
    }
    document.body.dataset.drawn = turn;
  });
}

let width = window.innerWidth, timer;
window.addEventListener("resize", () => {
  clearTimeout(timer);
  timer = setTimeout(() => { if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); } }, 200);
});

// On paper everything is open, and as many panels lie in a row as can be read, below one legend. Printing waits for no
// timer, but for promises that are kept at once, as Vega's are: nothing here is loaded.
const PAPER_PX = 1040, SMALLEST = 0.72, PAPER_PANEL_PX = 220, PAPER_HEIGHT_PX = 120, PAPER_STEP_PX = 16;

function dropLegends(node) {
  if (node === null || typeof node !== "object") return;
  if ("legend" in node) node.legend = null;
  for (const child of Object.values(node)) dropLegends(child);
}

async function drawForPaper(figure, choice) {
  const spec = JSON.parse(specs[figure.dataset.figure]), left = filtered(spec, choice), paper = document.createElement("div");
  paper.className = "paper";
  figure.append(paper);
  const panels = spec.facet.sort.filter((panel) => left.has(panel)), { height } = spec.spec;
  withSharedAxes(spec);
  spec.spec.height = height?.step ? { step: Math.min(height.step, PAPER_STEP_PX) } : Math.min(height, PAPER_HEIGHT_PX);
  let columns = Math.min(4, panels.length), scale;
  for (let first = 0; first < panels.length; first += columns) {
    const spot = paper.appendChild(document.createElement("div")), some = () => panels.slice(first, first + columns);
    const drawn = async () => {
      await vegaEmbed(spot, fitted(part(spec, some(), first === 0), columns, PAPER_PANEL_PX, 2), OPTIONS);
      return spot.querySelector("svg");
    };
    let image = await drawn();
    const widthOf = (image) => image.viewBox.baseVal.width;
    while (first === 0 && columns > 1 && widthOf(image) * SMALLEST > PAPER_PX) columns -= 1, image = await drawn();
    scale ??= Math.min(1, PAPER_PX / widthOf(image));
    image.style.width = `${scale * widthOf(image)}px`;
    if (first === 0) dropLegends(spec.spec.layer ?? spec.spec);
  }
}

window.addEventListener("beforeprint", async () => {
  for (const folded of document.querySelectorAll("details:not([open]):not(.long)")) {
    folded.open = true;
    folded.dataset.folded = "";
  }
  if (!specs || document.body.dataset.drawn === undefined) return;
  const choice = chosen();
  for (const figure of figures) await drawForPaper(figure, choice);
});
window.addEventListener("afterprint", () => {
  for (const paper of document.querySelectorAll(".paper")) paper.remove();
  for (const folded of document.querySelectorAll("details[data-folded]")) {
    folded.open = false;
    delete folded.dataset.folded;
  }
});

async function begin() {
  [specs] = await Promise.all([unpacked("#specs").then(JSON.parse), unpacked("#vega").then((code) => {
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
  })]);
  if (form) {
    form.hidden = false;
    const told = () => document.documentElement.style.setProperty("--filter-height", `${form.offsetHeight}px`);
    new ResizeObserver(told).observe(form); // it lies above what a link leads to
    form.addEventListener("change", drawAll);
    form.addEventListener("reset", () => {
      document.body.dataset.drawn = "";
      setTimeout(drawAll); // after the boxes are cleared
    });
  }
  drawAll();
}

function showImages() {
  for (const { dataset, lastElementChild: place } of figures) {
    const image = document.createElement("img");
    image.src = `figures/${dataset.figure}.svg`;
    place.replaceChildren(image);
    dataset.empty = "";
  }
}

if ("DecompressionStream" in window) begin().catch((error) => {
  showImages();
  throw error;
});
else showImages(); // a browser from before 2023
