// The theme leaves its search dialog without a name for screen readers.
for (const search of document.querySelectorAll(".md-search")) search.setAttribute("aria-label", "Search");

// What scrolls sideways on this screen can be scrolled by the keyboard, too.
function reachByKeyboard() {
  for (const block of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap")) {
    if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
  }
}
addEventListener("load", reachByKeyboard);
addEventListener("resize", reachByKeyboard);
