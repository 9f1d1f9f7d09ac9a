/** Numbers as text: three significant digits and a unit. */

export function duration(ns: number | null | undefined): string {
  if (ns === null || ns === undefined || Number.isNaN(ns)) return "–";
  const size = Math.abs(ns);
  if (size < 1e3) return `${Math.round(ns)} ns`;
  if (size < 999.5e3) return `${digits(ns / 1e3)} µs`;
  if (size < 999.5e6) return `${digits(ns / 1e6)} ms`;
  if (size < 99.5e9) return `${digits(ns / 1e9)} s`;
  const seconds = Math.round(size / 1e9);
  const sign = ns < 0 ? "−" : "";
  if (seconds < 3600) return `${sign}${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (seconds < 86_400) return `${sign}${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${sign}${Math.floor(seconds / 86_400)} d ${Math.floor((seconds % 86_400) / 3600)} h`;
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

export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const value = share * 100;
  return `${Math.abs(value) < 9.95 && value !== 0 ? value.toFixed(1) : Math.round(value)}%`;
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

export function digits(value: number): string {
  const size = Math.abs(value);
  return size >= 99.95 ? value.toFixed(0) : size >= 9.995 ? value.toFixed(1) : value.toFixed(2);
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

/** At most `longest` characters, then an ellipsis; surrogate pairs are not split. */
export function cutText(text: string, longest: number): string {
  if (text.length <= longest) return text;
  const half = /[\uD800-\uDBFF]/.test(text.charAt(longest - 1));
  return `${text.slice(0, half ? longest - 1 : longest)}…`;
}
