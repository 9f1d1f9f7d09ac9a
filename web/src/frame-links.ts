/**
 * Links within the page if the address cannot be changed: in a notebook, report.html is in a frame with the notebook's
 * address, and following `#/…` would load the notebook into the frame.
 */

import { readRoute } from "./address";
import { go } from "./route";

export function keepLinksInside(): void {
  addEventListener("click", (event) => {
    const link = event.target instanceof Element ? event.target.closest("a[href^='#']") : null;
    const address = link?.getAttribute("href") ?? null;
    if (address === null || event.defaultPrevented || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    if (address.startsWith("#/")) go(readRoute(address));
    else document.getElementById(address.slice(1))?.focus();
  });
}
