/** Button that copies a text to the clipboard and confirms it. */

import { useEffect, useState } from "preact/hooks";
import { copied } from "./clipboard";

interface CopyProps {
  text: string;
  /** What is copied, for the accessible label: `the command`. */
  what: string;
}

const SHOWN_MS = 2000;

export function CopyButton({ text, what }: CopyProps) {
  const [said, setSaid] = useState("");
  useEffect(() => {
    if (!said) return;
    const timer = setTimeout(() => setSaid(""), SHOWN_MS);
    return () => clearTimeout(timer);
  }, [said]);
  return (
    <>
      <button type="button" class="quiet" aria-label={`Copy ${what}`} onClick={() => void copied(text).then((done) => setSaid(done ? "Copied" : "Cannot copy here"))}>
        {said || "Copy"}
      </button>
      <span class="hidden" role="status">
        {said}
      </span>
    </>
  );
}
