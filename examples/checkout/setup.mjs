// Installs and builds all that the shop needs: the two libraries of this repository, and the page.
import { execFileSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const run = (directory, ...command) => {
  const cwd = fileURLToPath(new URL(directory, import.meta.url));
  execFileSync(command[0], command.slice(1), { cwd, stdio: 'inherit', shell: process.platform === 'win32' });
};
for (const library of ['../../sdk/node/', '../../sdk/browser/']) {
  if (!existsSync(new URL(`${library}dist`, import.meta.url))) {
    run(library, 'npm', 'ci', '--no-audit', '--no-fund');
    run(library, 'node', 'build.mjs');
  }
}
run('.', 'npm', 'ci', '--no-audit', '--no-fund');
run('.', 'npx', '--no-install', 'vite', 'build');
