// The pictures of a report (chart.js), and its light and dark: everything is in the page; nothing is fetched.
const data = JSON.parse(document.getElementById("data").textContent), root = document.documentElement;
const drawn = [...document.querySelectorAll("figure.picture")].map((figure, i) => new Chart(figure, data.pictures[i]));

const theme = document.getElementById("theme"), scheme = matchMedia("(prefers-color-scheme: dark)");
const dark = () => (root.dataset.theme || (scheme.matches ? "dark" : "light")) === "dark";
const name = () => { theme.textContent = dark() ? data.texts.light : data.texts.dark; };
theme.hidden = false; name();
theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
scheme.addEventListener("change", name);
