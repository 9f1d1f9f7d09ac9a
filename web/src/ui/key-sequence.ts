/** Match a key to a shortcut, given the keys before it: `g` then `l` is one shortcut. */

export interface Shortcut {
  /** Names from `KeyboardEvent.key`, separated by spaces: `g l`. */
  keys: string;
  words: string;
  act: () => void;
}

/** The matching shortcut, and the keys to remember for the next one. */
export function matched(shortcuts: readonly Shortcut[], before: string, key: string): { found: Shortcut | null; rest: string } {
  for (const typed of before ? [`${before} ${key}`, key] : [key]) {
    const found = shortcuts.find((one) => one.keys === typed);
    if (found !== undefined) return { found, rest: "" };
    if (shortcuts.some((one) => one.keys.startsWith(`${typed} `))) return { found: null, rest: typed };
  }
  return { found: null, rest: "" };
}
