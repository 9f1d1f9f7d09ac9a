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
  children: ComponentChildren;
}

export function Card({ title, about, tools, csv, class: more = "", children }: CardProps) {
  const id = useId();
  return (
    <section class={`card ${more}`} aria-labelledby={id}>
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

/** Shown instead of a panel's content if there is none, with the reason. */
export function Nothing({ children }: { children: ComponentChildren }) {
  return <p class="nothing">{children}</p>;
}
