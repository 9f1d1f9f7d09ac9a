/** Colors of what a device or host does in a trace; the same in bars, columns and the timeline. */

import { phaseProperty } from "./palette";

const PROPERTIES: Readonly<Record<string, string>> = {
  compute: "--phase-forward",
  overlap: "--phase-backward",
  comm: "--phase-comm",
  copy: "--phase-optimizer",
  idle: "--phase-other",
  launch: "--phase-checkpoint",
  wait: "--phase-h2d",
  host: "--phase-own-1",
  op: "--phase-own-2",
  annotation: "--phase-other",
  python: "--phase-own-0",
  runtime: "--phase-eval",
  input: "--phase-input",
};

/** The custom property of styles/tokens.css with the color; a comparison has phases of a step. */
export function lookProperty(look: string): string {
  return PROPERTIES[look] ?? phaseProperty(look);
}
