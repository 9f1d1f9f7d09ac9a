/** Keyboard shortcuts. Each screen registers its own; `?` lists them all. */

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { matched, type Shortcut } from "./key-sequence";

export interface Keys {
  title: string;
  shortcuts: Shortcut[];
}

const FORGET_MS = 1500;
/** The shortcuts of the components that are mounted. */
export const allKeys = signal<readonly Keys[]>([]);
let before = "";
let beforeMs = 0;

/** Register shortcuts while the component is mounted; their actions may change between renders. */
export function useShortcuts(title: string, shortcuts: Shortcut[]): void {
  const latest = useRef(shortcuts);
  latest.current = shortcuts;
  const which = shortcuts.map((one) => `${one.keys}=${one.words}`).join("\n");
  useEffect(() => {
    const ours = { title, shortcuts: latest.current.map((one, at) => ({ ...one, act: () => latest.current[at]?.act() })) };
    allKeys.value = [...allKeys.peek(), ours];
    return () => {
      allKeys.value = allKeys.peek().filter((one) => one !== ours);
    };
  }, [title, which]);
}

export function startShortcuts(): void {
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || event.isComposing) return;
    if (document.querySelector("dialog[open]") !== null) return;
    if (event.timeStamp - beforeMs > FORGET_MS) before = "";
    const { found, rest } = matched(allKeys.peek().flatMap((one) => one.shortcuts), before, event.key);
    before = rest;
    beforeMs = event.timeStamp;
    if (found === null) return;
    event.preventDefault();
    found.act();
  });
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || target.matches("input, textarea, select"));
}
