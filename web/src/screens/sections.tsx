/** Links to the panels of a run, always in view below its name; the one being read is marked. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { scrollTo } from "../ui/card";

/** A panel counts as being read if it is in the upper part of the window, this far below the bar. */
const BELOW = 30;

export function Sections() {
  const names = useSignal<string[]>([]);
  const now = useSignal("");
  const bar = useRef<HTMLElement>(null);
  useEffect(() => {
    const main = document.getElementById("main");
    if (main === null) return;
    const inView = new Set<Element>();
    const above = (bar.current?.closest("header")?.offsetHeight ?? 0) + BELOW;
    const reading = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) isIntersecting ? inView.add(target) : inView.delete(target);
        const first = sections(main).find((section) => inView.has(section));
        if (first !== undefined) now.value = nameOf(first);
      },
      { rootMargin: `-${above}px 0px -60% 0px` },
    );
    let known: HTMLElement[] = [];
    const list = (): void => {
      const found = sections(main);
      const labels = found.map(nameOf);
      if (labels.join("\n") !== names.peek().join("\n")) names.value = labels;
      for (const gone of known.filter((section) => !found.includes(section))) {
        reading.unobserve(gone);
        inView.delete(gone);
      }
      for (const section of found) if (!known.includes(section)) reading.observe(section);
      known = found;
    };
    list();
    // Panels appear as their data arrives; only direct children of the screen count.
    const changes = new MutationObserver(list);
    changes.observe(main, { childList: true });
    return () => {
      changes.disconnect();
      reading.disconnect();
    };
  }, []);
  useEffect(() => {
    const chosen = bar.current?.querySelector<HTMLElement>("[aria-current]");
    // Not scrollIntoView, which would also scroll the page.
    if (chosen && bar.current) bar.current.scrollLeft = chosen.offsetLeft - bar.current.clientWidth / 3;
  }, [now.value]);
  return (
    <nav ref={bar} class="sections" aria-label="Sections">
      {names.value.map((name) => (
        <button
          key={name}
          type="button"
          class="quiet"
          aria-current={now.value === name ? "true" : undefined}
          onClick={() => {
            const main = document.getElementById("main");
            const section = main === null ? undefined : sections(main).find((one) => nameOf(one) === name);
            if (section !== undefined) scrollTo(section);
          }}
        >
          {name}
        </button>
      ))}
    </nav>
  );
}

function sections(main: HTMLElement): HTMLElement[] {
  return [...main.querySelectorAll<HTMLElement>(":scope > section")];
}

function nameOf(section: HTMLElement): string {
  return section.getAttribute("aria-label") ?? section.querySelector("h2")?.textContent ?? "";
}
