/** Numbers as text: three significant digits and a unit. */

const UNITS: readonly (readonly [string, number])[] = [["µs", 1e3], ["ms", 1e6], ["s", 1e9]];
const LONG: readonly (readonly [string, number, string, number])[] = [["d", 86_400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]];

/**
 * The same text as `ns_text` in `records/text.py` (both are tested with one table): `850 ns`, `83.0 µs`, `12.3 s`, `1 min 15 s`,
 * `2 h 7 min`, `3 d`. `whole`: whole seconds, for something that is still growing or long ago.
 */
export function duration(ns: number | null | undefined, whole = false): string {
  if (ns === null || ns === undefined || Number.isNaN(ns)) return "–";
  if (whole) ns = Math.max(ns, 0);
  if (ns < 0) return `-${duration(-ns)}`;
  const seconds = Math.floor(ns / 1e9 + 0.5);
  if (seconds < 60 && whole) return `${seconds} s`;
  if (ns >= 59.95e9 || whole) return long(seconds);
  if (ns < 999.5) return ns === 0 ? "0" : `${Math.floor(ns + 0.5)} ns`;
  const [unit, size] = UNITS.find(([, one]) => ns < 999.5 * one) ?? ["s", 1e9];
  return `${digits(ns / size)} ${unit}`;
}

function long(seconds: number): string {
  const [unit, size, part, smaller] = LONG.find((units) => seconds >= units[1]) ?? ["min", 60, "s", 1];
  const rest = Math.floor((seconds % size) / smaller);
  return `${Math.floor(seconds / size)} ${unit}${rest > 0 ? ` ${rest} ${part}` : ""}`;
}

/** Binary units with three digits: `1.50 GiB`. */
export function bytes(count: number | null | undefined): string {
  if (count === null || count === undefined || Number.isNaN(count)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let value = count;
  let at = 0;
  while (Math.abs(value) >= 999.5 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return at === 0 ? `${Math.round(value)} B` : `${digits(value)} ${units[at]}`;
}

/** Binary units as in the texts of findings: `512 MiB`, `1.6 GiB`. */
export function binary(count: number | null | undefined): string {
  if (count === null || count === undefined || Number.isNaN(count)) return "–";
  if (count > 0 && count < 0.5) return "<1 B";
  const units = ["B", "KiB", "MiB", "GiB"];
  let size = count;
  for (const unit of units) {
    if (Math.abs(size) < 1000) return `${Math.abs(size) >= 10 || unit === "B" ? Math.round(size) : size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TiB`;
}

/** `3.2%`, `43%`. The same text as `percent_text` in `records/text.py`, as of the next two; all are tested with one table. */
export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const size = Math.abs(share * 100);
  const places = size > 0 && size < 9.95 ? 1 : 0;
  const text = size > 0 && size < 0.05 ? "<0.1" : halfUp(size, places).toFixed(places);
  return `${share < 0 ? "-" : ""}${text}%`;
}

/** GPU hours: `12.3`, `1,235`; below a twentieth `<0.1`. */
export function hoursText(hours: number | null | undefined): string {
  if (hours === null || hours === undefined || Number.isNaN(hours)) return "–";
  const size = Math.abs(hours);
  const places = size > 0 && size < 99.95 ? 1 : 0;
  const text = size > 0 && size < 0.05 ? "<0.1" : places === 1 ? halfUp(size, 1).toFixed(1) : GROUPED.format(halfUp(size, 0));
  return `${hours < 0 ? "-" : ""}${text}`;
}

/** Never rounded up to certainty. */
export function confidenceText(confidence: number | null): string {
  if (confidence === null) return "–";
  return confidence > 0.999 ? ">99.9%" : `${(Math.floor(confidence * 1000) / 10).toFixed(1)}%`;
}

function halfUp(size: number, places: number): number {
  const power = 10 ** places;
  return Math.floor(size * power + 0.5) / power;
}

/** Created once: creating a formatter is slow. */
const GROUPED = new Intl.NumberFormat("en-GB");
const SECONDS = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DATE = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });

export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : GROUPED.format(value);
}

/** `step 41`, `steps 60–61`. */
export function stepsText([first, last]: readonly [number, number]): string {
  return first === last ? `step ${count(first)}` : `steps ${count(first)}–${count(last)}`;
}

/** Three digits, rounded half up as in Python; `toFixed` alone differs from it. */
export function digits(value: number): string {
  const size = Math.abs(value);
  const places = size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return `${value < 0 ? "-" : ""}${halfUp(size, places).toFixed(places)}`;
}

export function clock(wallNs: number): string {
  return SECONDS.format(new Date(wallNs / 1e6));
}

export function dateTime(wallNs: number): string {
  const when = new Date(wallNs / 1e6);
  return `${DATE.format(when)}, ${SECONDS.format(when)}`;
}

/** `0–3, 7`: consecutive numbers as ranges, at most `most` of them. */
export function spans(numbers: readonly number[], most = 6): string {
  const sorted = [...numbers].sort((one, two) => one - two);
  const pieces: string[] = [];
  for (let at = 0; at < sorted.length; ) {
    let end = at;
    while (end + 1 < sorted.length && sorted[end + 1] === (sorted[end] ?? 0) + 1) end += 1;
    pieces.push(end > at ? `${sorted[at]}–${sorted[end]}` : `${sorted[at]}`);
    at = end + 1;
  }
  return pieces.length > most ? `${pieces.slice(0, most).join(", ")} and ${pieces.length - most} more` : pieces.join(", ");
}

/** A number on an axis: zero has no unit, and trailing zeros are removed. */
export function tick(value: number, format: (value: number) => string): string {
  return value === 0 ? "0" : format(value).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

export function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** At most `longest` characters, then an ellipsis; surrogate pairs are not split. */
export function cutText(text: string, longest: number): string {
  if (text.length <= longest) return text;
  const half = /[\uD800-\uDBFF]/.test(text.charAt(longest - 1));
  return `${text.slice(0, half ? longest - 1 : longest)}…`;
}
