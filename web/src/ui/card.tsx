/** A panel of a screen: heading, tools, CSV download and content. */

import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";
import { csvText, download, type Csv } from "./csv";

interface CardProps {
  title: string;
  /** Text next to the title: what is shown, in which unit. */
  about?: ComponentChildren;
  /** Buttons and choices. */
  tools?: ComponentChildren;
  /** The figures of the panel, and the name of their file. */
  csv?: { name: string; make: () => Csv | null };
  class?: string;
  /** A name by which `reveal` finds it. */
  part?: string;
  children: ComponentChildren;
}

export function Card({ title, about, tools, csv, class: more = "", part, children }: CardProps) {
  const id = useId();
  return (
    <section class={`card ${more}`} aria-labelledby={id} data-part={part}>
      <header class="card-head">
        <h2 id={id}>{title}</h2>
        {about && <p class="card-about">{about}</p>}
        <div class="card-tools">
          {tools}
          {csv && (
            <button
              type="button"
              class="quiet"
              title="Download the figures of this panel"
              aria-label={`Download “${title}” as CSV`}
              onClick={() => {
                const made = csv.make();
                if (made !== null) download(`${csv.name}.csv`, csvText(made));
              }}
            >
              CSV
            </button>
          )}
        </div>
      </header>
      {children}
    </section>
  );
}

/** How many frames to wait for a panel whose data is still loading: a few seconds. */
const MOST_FRAMES = 300;

/** Scroll to a panel and focus it, so that Tab continues there; it may appear only when its data has arrived. */
export function reveal(part: string, frames = MOST_FRAMES): void {
  requestAnimationFrame(() => {
    const found = document.querySelector<HTMLElement>(`main [data-part="${part}"]`);
    if (found !== null) scrollTo(found);
    else if (frames > 0) reveal(part, frames - 1);
  });
}

export function scrollTo(section: HTMLElement): void {
  section.tabIndex = -1;
  section.focus({ preventScroll: true });
  section.scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "instant" : "smooth" });
}

/** Shown instead of a panel's content if there is none, with the reason. */
export function Nothing({ children }: { children: ComponentChildren }) {
  return <p class="nothing">{children}</p>;
}
