// Says on a page that waits that the sidecar does not answer, and lets the page ask less often meanwhile. Each page works without it.
(() => {
  const pause = 5000;
  let failedAt = -Infinity;
  const note = (isGone) => {
    for (const element of document.querySelectorAll("[data-gone]")) element.hidden = !isGone;
  };
  document.addEventListener("htmx:before:request", (event) => {
    if (performance.now() - failedAt < pause) event.preventDefault();
  });
  document.addEventListener("htmx:error", (event) => {
    if (!event.detail?.ctx) return;
    failedAt = performance.now();
    note(true);
  });
  document.addEventListener("htmx:before:response", () => {
    failedAt = -Infinity;
    note(false);
  });
})();
