/** Light or dark theme: the system's until the user chooses. Charts redraw when `theme` changes. */

import { signal } from "@preact/signals";

export type Theme = "light" | "dark";

const KEPT = "stepscope-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

export const theme = signal<Theme>(kept() ?? (system.matches ? "dark" : "light"));

export function startTheme(): void {
  system.addEventListener("change", () => {
    if (kept() === null) theme.value = system.matches ? "dark" : "light";
  });
  theme.subscribe((now) => {
    document.documentElement.dataset["theme"] = now;
  });
}

export function switchTheme(): void {
  theme.value = theme.value === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(KEPT, theme.value);
  } catch {
    // A file or a frame may have no storage; the choice then lasts until the page is closed.
  }
}

/** A color of styles/tokens.css in the current theme, such as `--phase-forward`. */
export function token(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function kept(): Theme | null {
  try {
    const stored = localStorage.getItem(KEPT);
    return stored === "light" || stored === "dark" ? stored : null;
  } catch {
    return null;
  }
}
