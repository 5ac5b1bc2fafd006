// Shows what a point stands for on hover and on touch; without scripts the points' <title> does it.
const tip = document.getElementById("tip");
for (const point of document.querySelectorAll("[data-tip]")) {
  point.querySelector("title")?.remove();
  const show = (event) => {
    tip.textContent = point.dataset.tip;
    const box = point.getBoundingClientRect(), left = box.left + box.width / 2;
    tip.style.left = Math.max(6, Math.min(left - tip.offsetWidth / 2, innerWidth - tip.offsetWidth - 6)) + "px";
    tip.style.top = (box.top - tip.offsetHeight - 4 > 4 ? box.top - tip.offsetHeight - 4 : box.bottom + 6) + "px";
    tip.style.opacity = 1;
    event.stopPropagation();
  };
  point.addEventListener("pointerenter", show);
  point.addEventListener("click", show);
  point.addEventListener("pointerleave", () => (tip.style.opacity = 0));
}
addEventListener("scroll", () => (tip.style.opacity = 0), { passive: true });
// A table that is wider than its card says so.
const measure = () => {
  for (const box of document.querySelectorAll(".scroll")) {
    const wide = box.scrollWidth > box.clientWidth + 2, hint = box.nextElementSibling?.matches(".more") ? box.nextElementSibling : null;
    if (wide && !hint) box.insertAdjacentHTML("afterend", '<p class="more">more columns: scroll this table sideways →</p>');
    if (!wide && hint) hint.remove();
  }
};
measure();
addEventListener("resize", measure);
for (const fold of document.querySelectorAll("details")) fold.addEventListener("toggle", measure);
