// The API, drawn from the server's own /openapi.json.

function schemaName(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  const union = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (union) return union.map(schemaName).join(" | ");
  if (schema.type === "array") return `list of ${schemaName(schema.items) || "any"}`;
  if (schema.type === "object" && schema.additionalProperties) return `{string: ${schemaName(schema.additionalProperties) || "any"}}`;
  return Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type ?? "any";
}

function schemaRange(schema) {
  const parts = [schema, ...(schema?.anyOf ?? [])].filter(Boolean);
  const of = (key) => parts.map((part) => part[key]).find((value) => value !== undefined);
  const bounds = [["minimum", "at least"], ["exclusiveMinimum", "above"], ["maximum", "at most"], ["minLength", "at least (characters)"], ["maxLength", "at most (characters)"], ["maxItems", "at most (items)"]];
  const said = bounds.filter(([key]) => of(key) !== undefined).map(([key, words]) => `${words} ${integer(of(key))}`);
  if (schema?.default !== undefined && schema.default !== null) said.push(`default ${JSON.stringify(schema.default)}`);
  return said.join(", ");
}

function fieldsTable(heads, fields) {
  return table(heads, fields.map(({name, schema, required, about}) => el("tr", {}, el("th", {scope: "row"}, el("code", {}, name), required ? "" : el("span", {class: "quiet small"}, " optional")),
    el("td", {}, el("code", {}, schemaName(schema))), el("td", {}, [about, schemaRange(schema)].filter(Boolean).join("; ")))));
}

function schemaFields(schema) {
  const required = new Set(schema.required ?? []);
  return Object.entries(schema.properties ?? {}).map(([name, one]) => ({name, schema: one, required: required.has(name), about: one.description}));
}

function operation(path, verb, said, schemas) {
  const body = said.requestBody?.content?.["application/json"]?.schema;
  const named = body?.$ref ? schemas[schemaName(body)] : body;
  const success = Object.entries(said.responses ?? {}).find(([status]) => status.startsWith("2"));
  const answer = success?.[1].content?.["application/json"]?.schema;
  return el("details", {class: "operation", "data-path": `${verb} ${path} ${said.summary ?? ""}`.toLowerCase()},
    el("summary", {}, el("span", {class: "verb"}, verb), " ", el("code", {}, path), el("span", {class: "quiet"}, said.summary ?? "")),
    el("div", {}, said.description ? el("p", {class: "lead"}, said.description) : null,
      said.parameters?.length ? [el("h4", {}, "Parameters"), fieldsTable(["name", "type", "about"],
        said.parameters.map((one) => ({name: one.name, schema: one.schema, required: one.required, about: [`in the ${one.in}`, one.description].filter(Boolean).join(": ")})))] : null,
      named ? [el("h4", {}, `Body${body.$ref ? `: ${schemaName(body)}` : ""}`), el("p", {class: "quiet"}, named.description ?? ""), fieldsTable(["field", "type", "about"], schemaFields(named))] : null,
      el("h4", {}, "Answer"), el("p", {class: "quiet"}, success ? `${success[0]}${answer ? `: ${schemaName(answer)}` : ""}` : "")));
}

VIEWS.set("api", {
  title: () => "API",
  draw(host) {
    const search = el("input", {type: "search", placeholder: "Filter by address or words", "aria-label": "Filter", autocomplete: "off", spellcheck: "false"});
    const body = el("div", {class: "reserve"}, el("p", {class: "empty"}, "Asking\u2026"));
    host.append(headed("API", el("a", {class: "button", href: "/openapi.json", target: "_blank", rel: "noopener"}, "openapi.json")), el("div", {class: "toolbar"}, search), body);
    search.addEventListener("input", () => {
      for (const one of body.querySelectorAll(".operation")) one.hidden = !matches(one.dataset.path, search.value.trim());
    });
    api("/openapi.json").then((said) => {
      const schemas = said.components?.schemas ?? {};
      const operations = Object.entries(said.paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, one]) => operation(path, verb, one, schemas)));
      const models = Object.entries(schemas).filter(([, one]) => one.properties).map(([name, one]) =>
        el("details", {class: "operation", "data-path": name.toLowerCase()}, el("summary", {}, el("code", {}, name)),
          el("div", {}, el("p", {class: "quiet"}, (one.description ?? "").split("\n")[0]), fieldsTable(["field", "type", "about"], schemaFields(one)))));
      body.replaceChildren(el("p", {class: "lead"}, said.info.description ?? ""), section("addresses", "Addresses", null, operations),
        section("sockets", "WebSockets", null, el("p", {class: "lead"}, el("code", {}, "/ws/runs/{name}?at=<byte>|step=<n>"), " and ", el("code", {}, "/ws/jobs/{id}?at=<byte>&log=<byte>"),
          " send JSON: rows of metrics with the offset behind them, states, the log. Ask again with the last offsets to miss nothing.")),
        section("schemas", "Schemas", null, models));
    }).catch((error) => body.replaceChildren(problem(error)));
    return null;
  },
});
