// Compiles the library twice, for `import` and for `require`, with its types.
import { execFileSync } from 'node:child_process';
import { rmSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const here = fileURLToPath(new URL('.', import.meta.url));
const tsc = fileURLToPath(new URL('./node_modules/typescript/bin/tsc', import.meta.url));
rmSync(new URL('./dist', import.meta.url), { recursive: true, force: true });
const compile = (...flags) => execFileSync(process.execPath, [tsc, '-p', here, ...flags], { stdio: 'inherit' });
compile();
compile('--module', 'commonjs', '--moduleResolution', 'node10', '--outDir', 'dist/cjs');
writeFileSync(new URL('./dist/cjs/package.json', import.meta.url), '{"type":"commonjs"}\n');
// For `prepare.sh`, which leaves a finished build alone while no source is newer. No part of the package.
writeFileSync(new URL('./dist/.built', import.meta.url), '');
