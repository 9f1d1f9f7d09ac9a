/** A panel's figures as a CSV file. */

export interface Csv {
  columns: string[];
  rows: (string | number | null)[][];
}

export function csvText({ columns, rows }: Csv): string {
  return [columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

/** Text that a spreadsheet would take for a formula gets a leading quote. */
function cell(value: string | number | null): string {
  if (value === null || (typeof value === "number" && Number.isNaN(value))) return "";
  if (typeof value === "number") return String(value);
  const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export function download(name: string, text: string, type = "text/csv"): void {
  downloadBlob(name, new Blob([text], { type: `${type};charset=utf-8` }));
}

export function downloadBlob(name: string, data: Blob): void {
  const address = URL.createObjectURL(data);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
