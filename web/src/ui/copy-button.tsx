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
  const [notice, setNotice] = useState("");
  useEffect(() => {
    if (!notice) return;
    const timer = setTimeout(() => setNotice(""), SHOWN_MS);
    return () => clearTimeout(timer);
  }, [notice]);
  return (
    <>
      <button type="button" class="quiet" aria-label={`Copy ${what}`} onClick={() => void copied(text).then((done) => setNotice(done ? "Copied" : "Cannot copy here"))}>
        {notice || "Copy"}
      </button>
      <span class="hidden" role="status">
        {notice}
      </span>
    </>
  );
}
