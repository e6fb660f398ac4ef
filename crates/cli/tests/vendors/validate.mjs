// Ends with 0 if the file is a valid OpenAPI document, by the published schema of its version.
import { readFileSync } from "node:fs";

import { Validator } from "@seriousme/openapi-schema-validator";

const result = await new Validator().validate(JSON.parse(readFileSync(process.argv[2], "utf8")));
if (!result.valid) {
  console.error(JSON.stringify(result.errors, undefined, 2));
  process.exit(1);
}
