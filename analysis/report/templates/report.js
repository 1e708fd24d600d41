// Hides the rows of configurations that are not chosen, and copies. Without it, the page has all rows and no buttons.
const form = document.querySelector("#filter");
const works = JSON.parse(document.querySelector("#index").textContent);
const keyOf = (group, configuration) => (group === undefined ? configuration : `${group}\n${configuration}`);

function hideRows() {
  const asked = new FormData(form), names = [...new Set(asked.keys())];
  const left = works.filter((work) => names.every((name) => asked.getAll(name).includes(work[name])));
  const kept = new Set(left.flatMap(({ group, configuration }) => [configuration, keyOf(group, configuration)]));
  for (const row of document.querySelectorAll("tr[data-configuration]")) {
    const { configuration, groups } = row.dataset; // `groups`: of runs of several lengths
    const of = groups ? JSON.parse(groups) : [row.parentElement.dataset.group];
    row.hidden = !of.some((group) => kept.has(keyOf(group, configuration)));
  }
  for (const body of document.querySelectorAll("tbody[data-group]"))
    body.hidden = !body.querySelector("tr[data-configuration]:not([hidden])");
  form.querySelector("output").textContent = names.length === 0 ? "" :
    left.length === 0 ? "No configuration has all of these." : `Shown: ${left.length} of ${works.length} configurations.`;
}

if (form) {
  form.hidden = false;
  form.addEventListener("change", hideRows);
  form.addEventListener("reset", () => setTimeout(hideRows)); // after the boxes are cleared
}

for (const button of document.querySelectorAll("[data-copies]")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copies).innerText.trim());
    button.textContent = "Copied";
  });
}
