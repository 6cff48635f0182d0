// The pictures of a report (draw.js draws them): everything comes from the JSON in the page; nothing is fetched.
const data = JSON.parse(document.getElementById("data").textContent), drawn = new Map();
prepare(data);
for (const picture of data.pictures) {
  const canvas = document.getElementById(picture.id), drawing = new Drawing(picture, canvas, document.getElementById(`${picture.id}-said`));
  drawn.set(picture.id, drawing);
  for (const input of document.getElementsByName(`${picture.id}-axis`)) input.addEventListener("change", () => drawing.choose(+input.value));
  for (const input of document.getElementsByName(`${picture.id}-smooth`)) input.addEventListener("input", () => { drawing.smooth(+input.value); input.nextElementSibling.value = input.value; });
}
const drawAll = () => drawn.forEach(drawing => drawing.draw());
drawAll();

const theme = document.getElementById("theme");
const name = () => { theme.textContent = dark() ? data.texts.light : data.texts.dark; };
theme.hidden = false; name();
theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); drawAll(); });
SCHEME.addEventListener("change", () => { name(); drawAll(); });
PRINT.addEventListener("change", drawAll);
addEventListener("beforeprint", () => { for (const { chart } of drawn.values()) chart.resize(Math.min(680, chart.width), chart.height); });
addEventListener("afterprint", drawAll);
addEventListener("resize", () => drawn.forEach(drawing => drawing.fit()));
