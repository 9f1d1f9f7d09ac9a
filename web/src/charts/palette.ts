/** Colours of phases, the same everywhere; told apart by people with any colour vision (see styles/tokens.css). */

/** In the order of a step; one that a user made comes before `other`. */
export const PHASE_ORDER = ["input", "h2d", "forward", "backward", "comm", "optimizer", "eval", "checkpoint"];
const OWN_COLOURS = 4;
/** What the scripts call their own phases: the place here is the colour, so that no two look alike while there are colours. */
const own: string[] = [];

export function ordered(phases: readonly string[]): string[] {
  const place = (name: string): number => {
    const at = PHASE_ORDER.indexOf(name);
    return name === "other" ? 1000 : at < 0 ? 100 : at;
  };
  return [...phases].sort((one, two) => place(one) - place(two) || (one < two ? -1 : 1));
}

/** Another run: its own phases have their colours in the order in which it told of them, the same in every tab. */
export function ownPhases(phases: readonly string[]): void {
  own.splice(0, own.length, ...phases.filter((phase) => !builtIn(phase)));
}

function builtIn(phase: string): boolean {
  return phase === "other" || PHASE_ORDER.includes(phase);
}

/** The name of the custom property with a phase's colour, for style sheets and `token`. */
export function phaseProperty(phase: string): string {
  if (builtIn(phase)) return `--phase-${phase}`;
  if (!own.includes(phase)) own.push(phase);
  return `--phase-own-${own.indexOf(phase) % OWN_COLOURS}`;
}

/** What a phase is, in a few words. */
export const PHASE_MEANING: Record<string, string> = {
  input: "waiting for the next batch",
  h2d: "copying the batch to the device",
  forward: "forward pass",
  backward: "backward pass",
  comm: "waiting for other ranks, and exchanging with them",
  optimizer: "optimizer step",
  eval: "evaluation",
  checkpoint: "writing a checkpoint",
  other: "what no phase claims",
};
