/** Colors of phases, the same everywhere; distinguishable with any color vision (see styles/tokens.css). */

/** In the order of a step; user-defined phases come before `other`. */
export const PHASE_ORDER = ["input", "h2d", "forward", "backward", "comm", "optimizer", "eval", "checkpoint"];
const OWN_COLORS = 4;
/** Names of user-defined phases; the index is the color, so that they differ while there are enough colors. */
const own: string[] = [];

export function ordered(phases: readonly string[]): string[] {
  const place = (name: string): number => {
    const at = PHASE_ORDER.indexOf(name);
    return name === "other" ? 1000 : at < 0 ? 100 : at;
  };
  return [...phases].sort((one, two) => place(one) - place(two) || (one < two ? -1 : 1));
}

/** For a new run: assign colors to its user-defined phases in their reported order, the same in every tab. */
export function ownPhases(phases: readonly string[]): void {
  own.splice(0, own.length, ...phases.filter((phase) => !builtIn(phase)));
}

function builtIn(phase: string): boolean {
  return phase === "other" || PHASE_ORDER.includes(phase);
}

/** The custom property with a phase's color, for style sheets and `token`. */
export function phaseProperty(phase: string): string {
  if (builtIn(phase)) return `--phase-${phase}`;
  if (!own.includes(phase)) own.push(phase);
  return `--phase-own-${own.indexOf(phase) % OWN_COLORS}`;
}

/** Short description of each phase. */
export const PHASE_MEANING: Record<string, string> = {
  input: "waiting for the next batch",
  h2d: "copying the batch to the device",
  forward: "forward pass",
  backward: "backward pass",
  comm: "communication, including the wait for other ranks",
  optimizer: "optimizer step",
  eval: "evaluation",
  checkpoint: "writing a checkpoint",
  other: "time outside all phases",
};
