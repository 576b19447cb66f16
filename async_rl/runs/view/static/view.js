// Comfort only: every page can be read without it. It draws live pages again, shows the values under
// the pointer, and applies the choice of a token's colour.
"use strict";
const main = document.getElementById("main");

// A live page: fetch it again and replace what it shows, unless somebody is choosing in a form.
async function refresh() {
  const seconds = Number(main.dataset.refresh);
  if (!seconds) return;
  await new Promise((done) => setTimeout(done, seconds * 1000));
  const busy = document.hidden || main.querySelector("form :focus");
  try {
    const reply = busy ? null : await fetch(location.href);
    if (reply && reply.ok) {
      const fresh = new DOMParser().parseFromString(await reply.text(), "text/html").getElementById("main");
      const chosen = new Map([...main.querySelectorAll("input[type=checkbox]")].map((box) => [box.value, box.checked]));
      main.replaceChildren(...fresh.childNodes);
      if (fresh.dataset.refresh) main.dataset.refresh = fresh.dataset.refresh; else delete main.dataset.refresh;
      for (const box of main.querySelectorAll("input[type=checkbox]")) if (chosen.has(box.value)) box.checked = chosen.get(box.value);
    }
  } catch { /* the server has ended or is restarting: ask again */ }
  refresh();
}

// The value of each line at the pointer, beside the chart's title.
function point(event) {
  const svg = event.target.closest?.("svg[data-x]");
  if (!svg) return;
  const [x0, x1] = svg.dataset.x.split(" ").map(Number), [y0, y1] = svg.dataset.y.split(" ").map(Number);
  const [left, right, top, bottom] = svg.dataset.frame.split(" ").map(Number);
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
  const texts = [];
  let cursor = at;
  for (const line of svg.querySelectorAll("polyline[data-label]")) {
    const points = [...line.points];
    const near = points.reduce((best, p) => (Math.abs(p.x - at) < Math.abs(best.x - at) ? p : best));
    const value = y0 + ((bottom - near.y) / (bottom - top)) * (y1 - y0);
    texts.push((points.length && svg.querySelectorAll("polyline[data-label]").length > 1 ? line.dataset.label + " " : "") + Number(value.toPrecision(4)));
    cursor = near.x;
  }
  const x = x0 + ((cursor - left) / (right - left)) * (x1 - x0);
  svg.closest("figure").querySelector("output").textContent = `${Number(x.toPrecision(4))}: ${texts.join(", ")}`;
  const mark = svg.querySelector(".cursor");
  mark.setAttribute("x1", cursor);
  mark.setAttribute("x2", cursor);
}

document.addEventListener("pointermove", point);
document.addEventListener("change", (event) => {
  if (event.target.name === "colour") main.dataset.colour = event.target.value;
  event.target.closest("form[data-submit=change]")?.submit();
});
refresh();
