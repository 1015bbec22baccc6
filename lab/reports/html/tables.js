// DataTables shows dark colours where the root element has the class "dark".
const dark = matchMedia("(prefers-color-scheme: dark)");
const followScheme = () => document.documentElement.classList.toggle("dark", dark.matches);
dark.addEventListener("change", followScheme);
followScheme();
// Tables start in the order of the file. Each becomes a DataTable when it is first shown, because some have hundreds of rows.
const wordFilters = [{ target: 0, content: [["search", "searchList"]] }];
const numberFilters = [{ target: 0, content: [["search"]] }];
const options = {
  order: [],
  autoWidth: false,
  pageLength: 25,
  lengthMenu: [10, 25, 100, { label: "all", value: -1 }],
  columnDefs: [
    { targets: "number", type: "num", columnControl: numberFilters },
    { targets: "words", columnControl: wordFilters },
  ],
};
// A table that fits on one page has neither pages nor a search field.
const withoutControls = { paging: false, layout: { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null } };
for (const details of document.querySelectorAll("details.table")) {
  const make = () => {
    const table = details.querySelector("table.data");
    if (!details.open || DataTable.isDataTable(table)) return;
    const isSmall = table.tBodies[0].rows.length <= options.pageLength;
    new DataTable(table, isSmall ? { ...options, ...withoutControls } : options);
  };
  details.addEventListener("toggle", make);
  make();
}
document.body.dataset.tables = "made"; // tests in a browser wait for this
