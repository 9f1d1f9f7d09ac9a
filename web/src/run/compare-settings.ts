/** Settings of two runs, flattened to names and texts, so that only the differences need to be shown. */

export type Settings = Map<string, string>;

export interface SettingsDifference {
  differ: { name: string; one: string | null; two: string | null }[];
  same: string[];
}

const DEEPEST = 4;

/** `{loader: {workers: 4}}` becomes `loader.workers: 4`; lists become one text; empty values are left out. */
export function flattened(value: unknown, name = "", into: Settings = new Map(), depth = 0): Settings {
  if (value === null || value === undefined || value === "") return into;
  if (typeof value === "object" && !Array.isArray(value) && depth < DEEPEST) {
    for (const [key, below] of Object.entries(value)) flattened(below, name ? `${name}.${key}` : key, into, depth + 1);
    return into;
  }
  into.set(name, typeof value === "string" ? value : JSON.stringify(value));
  return into;
}

export function settingsDifference(one: Settings, two: Settings): SettingsDifference {
  const found: SettingsDifference = { differ: [], same: [] };
  for (const name of new Set([...one.keys(), ...two.keys()])) {
    const [here, there] = [one.get(name) ?? null, two.get(name) ?? null];
    if (here === there) found.same.push(name);
    else found.differ.push({ name, one: here, two: there });
  }
  return found;
}

export interface Word {
  text: string;
  /** Whether the other text lacks it, or has it less often. */
  own: boolean;
}

/** Split a text into words and mark those that the other text lacks. */
export function ownWords(text: string, other: string | null): Word[] {
  const left = new Map<string, number>();
  for (const word of (other ?? "").split(/(\s+)/)) left.set(word, (left.get(word) ?? 0) + 1);
  return text.split(/(\s+)/).map((word) => {
    const many = left.get(word) ?? 0;
    left.set(word, many - 1);
    return { text: word, own: many <= 0 && word.trim() !== "" };
  });
}
