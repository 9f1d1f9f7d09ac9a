/** What every screen has at its top right: a link to exactly this, the theme, the keys. */

import { settle } from "../route";
import { copied } from "../ui/clipboard";
import { Icon } from "../ui/icons";
import { useShortcuts } from "../ui/shortcuts";
import { switchTheme, theme } from "../ui/theme";
import { tell } from "../ui/toast";
import { showHelp } from "./help";

export function PageTools() {
  const other = theme.value === "dark" ? "light" : "dark";
  useShortcuts("Everywhere", [
    { keys: "c", words: "copy a link to exactly what is shown", act: () => void copyLink() },
    { keys: "t", words: "light or dark", act: switchTheme },
    { keys: "?", words: "these keys", act: showHelp },
  ]);
  return (
    <div class="tools">
      <button type="button" class="icon-button" title="Copy a link to exactly what is shown (c)" aria-label="Copy link" onClick={() => void copyLink()}>
        <Icon name="link" />
      </button>
      <button type="button" class="icon-button" title={`Use the ${other} theme (t)`} aria-label={`Use the ${other} theme`} onClick={switchTheme}>
        <Icon name={other === "dark" ? "moon" : "sun"} />
      </button>
      <button type="button" class="icon-button" title="Keys (?)" aria-label="Keys" onClick={showHelp}>
        <Icon name="keys" />
      </button>
    </div>
  );
}

async function copyLink(): Promise<void> {
  settle();
  tell((await copied(location.href)) ? "Link copied: it names the run, the steps and the rank." : "This browser does not let a page copy; take the link from its address bar.");
}
