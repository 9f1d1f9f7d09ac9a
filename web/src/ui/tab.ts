/** Title and icon of the browser tab show the state of the run, even in the background. */

import { token } from "./theme";

export type Mark = "none" | "live" | "good" | "warning" | "critical";

const SIGNS: Record<Mark, string> = { none: "", live: "", good: "", warning: "▲ ", critical: "✖ " };
const COLORS: Record<Mark, string> = { none: "--muted", live: "--accent", good: "--good", warning: "--warning", critical: "--critical" };
const SHAPES: Record<Mark, string> = {
  none: '<circle cx="8" cy="8" r="6"/>',
  live: '<circle cx="8" cy="8" r="6"/>',
  good: '<circle cx="8" cy="8" r="6"/>',
  warning: '<path d="M8 1.5 15 14H1Z"/>',
  critical: '<path d="M3 1 8 6l5-5 2 2-5 5 5 5-2 2-5-5-5 5-2-2 5-5-5-5Z"/>',
};

export function setTab(title: string, mark: Mark): void {
  const whole = `${SIGNS[mark]}${title ? `${title} · ` : ""}Stepscope`;
  if (document.title !== whole) document.title = whole;
  const link = document.querySelector<HTMLLinkElement>('link[rel="icon"]');
  const drawn = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" fill="${token(COLORS[mark])}">${SHAPES[mark]}</svg>`;
  const address = `data:image/svg+xml,${encodeURIComponent(drawn)}`;
  if (link !== null && link.href !== address) link.href = address;
}
