/**
 * Links within the page where the address cannot be changed: report.html in a frame of a notebook has an address that is
 * not its own, and following `#/…` there would load the notebook into the frame.
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
