/** Which shortcut a key means, given the one before it: `g` and then `l` is one. */

export interface Shortcut {
  /** Keys as `KeyboardEvent.key` names them, one after the other, divided by blanks: `g l`. */
  keys: string;
  words: string;
  act: () => void;
}

/** The shortcut that is meant, and what of the keys has to be remembered for the next. */
export function matched(shortcuts: readonly Shortcut[], before: string, key: string): { found: Shortcut | null; rest: string } {
  for (const typed of before ? [`${before} ${key}`, key] : [key]) {
    const found = shortcuts.find((one) => one.keys === typed);
    if (found !== undefined) return { found, rest: "" };
    if (shortcuts.some((one) => one.keys.startsWith(`${typed} `))) return { found: null, rest: typed };
  }
  return { found: null, rest: "" };
}
