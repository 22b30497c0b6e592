// The body of an async function: what of a page cannot be read or reached at this width. LOW: pixels of a line of letters.
await wait(300);
for (const part of all("details")) part.open = true;
await wait(100);
const scrolls = (node) => node !== null && (["auto", "scroll"].includes(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
const box = (node) => node.getBoundingClientRect();
const written = (cell) => { const range = document.createRange(); range.selectNodeContents(cell); return box(range); };
const overlap = (one, other) => one.width > 0 && other.width > 0 && one.right > other.left + 1 && one.left < other.right - 1
  && one.bottom > other.top + 1 && one.top < other.bottom - 1;
const neighbours = all("tr").flatMap((row) => [...row.cells].slice(1).map((cell, i) => [row.cells[i], cell]));
const axes = all("svg .axes").map((axis) => [...axis.querySelectorAll("text")].map((text) => `${text.getAttribute("text-anchor")} ${text.textContent}`));
return {
  wide: Math.max(0, document.documentElement.scrollWidth - innerWidth),
  low: all("svg text").filter((text) => box(text).height > 0 && box(text).height < LOW).map((text) => text.textContent),
  out: all("table, pre, img, svg").filter((node) => box(node).right > innerWidth + 1 && !scrolls(node)).map((node) => node.outerHTML.slice(0, 80)),
  over: neighbours.filter(([one, other]) => overlap(written(one), written(other))).map((cells) => cells.map((cell) => cell.textContent)),
  cut: all("svg .axes text").filter((text) => box(text).left < box(text.ownerSVGElement).left - 1).map((text) => text.textContent),
  twice: axes.filter((labels) => new Set(labels).size < labels.length),
  images: all("img").map((image) => image.clientWidth / image.naturalWidth),
};
