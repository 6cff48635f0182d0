// A table that scrolls sideways can be reached, and so scrolled, by keyboard. The theme makes its wrappers late.
const reachable = () => {
  for (const wrapper of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) wrapper.tabIndex = 0;
};
new MutationObserver(reachable).observe(document.body, { childList: true, subtree: true });
reachable();
