/** A word about what just happened, seen for a moment and read aloud. */

import { signal } from "@preact/signals";
import "./toast.css";

const SHOWN_MS = 4000;
const said = signal("");
let timer: ReturnType<typeof setTimeout> | undefined;

export function tell(words: string): void {
  clearTimeout(timer);
  said.value = words;
  timer = setTimeout(() => {
    said.value = "";
  }, SHOWN_MS);
}

/** Stands once on the page, also while empty: a live region has to be there before its words are. */
export function Toast() {
  return (
    <div class="toast" role="status" data-shown={said.value !== ""}>
      {said.value}
    </div>
  );
}
