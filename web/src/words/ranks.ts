/** Ranks in words: `rank 1`, `ranks 0, 2 and 3`, `ranks 0–7 and 10`. */

const SPANS_SHOWN = 8;

export function spansText(numbers: readonly number[]): string {
  const sorted = [...new Set(numbers)].sort((one, two) => one - two);
  const parts: string[] = [];
  for (let at = 0; at < sorted.length; ) {
    let end = at;
    while (end + 1 < sorted.length && sorted[end + 1] === (sorted[end] ?? 0) + 1) end += 1;
    if (end - at > 1) parts.push(`${sorted[at]}–${sorted[end]}`);
    else parts.push(...sorted.slice(at, end + 1).map(String));
    at = end + 1;
  }
  if (parts.length > SPANS_SHOWN) return `${parts.slice(0, SPANS_SHOWN).join(", ")} and ${parts.length - SPANS_SHOWN} more`;
  return parts.length > 1 ? `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}` : (parts[0] ?? "none");
}

export function ranksText(ranks: readonly number[], start = false): string {
  const word = new Set(ranks).size === 1 ? "rank" : "ranks";
  return `${start ? word[0]?.toUpperCase() + word.slice(1) : word} ${spansText(ranks)}`;
}

/** `3 ranks`, `1 rank`, `2 processes`. */
export function countOf(count: number, word: string): string {
  const ending = count === 1 ? "" : word.endsWith("s") ? "es" : "s";
  return `${count.toLocaleString("en-GB")} ${word}${ending}`;
}

/** The finite numbers in an untrusted list. */
export function numbersIn(value: unknown): number[] {
  return Array.isArray(value) ? value.filter((one): one is number => typeof one === "number" && Number.isFinite(one)) : [];
}
