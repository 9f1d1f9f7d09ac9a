/** A short message about what just happened, shown for a moment and read by screen readers. */

import { signal } from "@preact/signals";
import "./toast.css";

const SHOWN_MS = 4000;
const message = signal("");
let timer: ReturnType<typeof setTimeout> | undefined;

export function tell(words: string): void {
  clearTimeout(timer);
  message.value = words;
  timer = setTimeout(() => {
    message.value = "";
  }, SHOWN_MS);
}

/** Mounted once, also while empty: a live region must exist before its text. */
export function Toast() {
  return (
    <div class="toast" role="status" data-shown={message.value !== ""}>
      {message.value}
    </div>
  );
}
