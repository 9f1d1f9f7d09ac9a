import type { Plugin } from "vite";

export function licenseNotices(): Plugin;
