// The theme leaves its search dialog without a name for screen readers.
for (const search of document.querySelectorAll(".md-search")) search.setAttribute("aria-label", "Search");
